"""Checkpoints: the table of names, complete loading, errors for damaged or hostile files, and atomic saving."""

import json
import os
import pickle
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dgemma import files, presets
from dgemma.checkpoint.reading import read_checkpoint, read_headers
from dgemma.checkpoint.tokenizer import ByteTokenizer, Tokenizer
from dgemma.location import resolve
from dgemma.model.config import GenerationDefaults
from dgemma.model.diffusion import DiffusionGemma
from quantized_files import edit

TINY = presets.tiny().replace(vocab_size=128, hidden_size=16, num_experts=4)
HEAD = "model.decoder.embed_tokens.weight"


def random_model(seed=0, **changes):
    model = DiffusionGemma(TINY.replace(**changes))
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def same_weights(a, b):
    other = b.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in a.state_dict().items())


@pytest.fixture
def folder(tmp_path):
    random_model().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    random_model().save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


@pytest.mark.parametrize("limit", ["5GB", "20KB", 1], ids=["single", "sharded", "one-tensor-a-shard"])
def test_saved_weights_load_bit_for_bit(tmp_path, limit):
    model = random_model()
    own = {"noise": {"kind": "mask", "mask_token_id": 9}, "sampler": {"name": "confidence", "greedy": True}}
    model.generation = GenerationDefaults(t_max=0.9, eos_token_id=(7,), **own)
    model.save_pretrained(tmp_path, max_shard_size=limit)
    loaded = DiffusionGemma.from_pretrained(tmp_path)
    assert same_weights(model, loaded)
    assert loaded.config.to_hf()["text_config"] == model.config.to_hf()["text_config"]
    assert loaded.generation == model.generation
    config, generation = (
        json.loads((tmp_path / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    assert {name: config[name] for name in own} == own
    assert not own.keys() & generation.keys()  # transformers would refuse them there
    assert not own.keys() & loaded.config.carried.keys()
    assert not list(tmp_path.glob("*.new"))


def test_a_dtype_may_be_given_by_its_name_and_must_be_one_of_weights(sharded):
    assert DiffusionGemma.from_pretrained(sharded, dtype="bfloat16").dtype == torch.bfloat16
    for dtype in ("bf16", torch.int8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"from_pretrained dtype must be one of bfloat16, float16, .* got "):
            DiffusionGemma.from_pretrained(sharded, dtype=dtype)
        with pytest.raises(ValueError, match=r"DiffusionGemma dtype must be one of bfloat16, float16, .* got "):
            DiffusionGemma(presets.tiny(), dtype=dtype)


def test_shards_stay_under_the_limit_and_the_index_accounts_for_every_byte(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = {}
    for file in sharded.glob("*.safetensors"):
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
        files |= dict.fromkeys(tensors, file.name)
    assert index["weight_map"] == files
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in random_model().state_dict().values())


def test_the_dtype_is_that_of_the_files_by_default(folder):
    assert DiffusionGemma.from_pretrained(folder).dtype == torch.float32
    half = DiffusionGemma.from_pretrained(folder, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in half.state_dict().values()} == {torch.bfloat16}
    half.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert DiffusionGemma.from_pretrained(folder).dtype == torch.bfloat16


def test_loading_holds_one_stored_tensor_at_a_time(sharded, monkeypatch):
    """Each tensor is converted and released before the next is read, so there is never a second copy of the weights."""
    alive, most = weakref.WeakSet(), []

    class Watched:
        def __init__(self, *args):
            self.file = safe_open(*args)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            alive.add(tensor)
            most.append(len(alive))
            return tensor

    monkeypatch.setattr(files, "safe_open", lambda *args, **kwargs: Watched(*args, *kwargs.values()))
    model = DiffusionGemma.from_pretrained(sharded, dtype=torch.bfloat16)
    assert len(most) == len(model.state_dict())
    assert max(most) == 1


def test_tied_copies_are_recognised(folder):
    def write_out_the_ties(tensors):
        decoder = [name for name in tensors if name.startswith("model.decoder.") and "self_cond" not in name]
        for name in decoder:
            if not name.endswith("layer_scalar"):
                copy = name.replace("model.decoder.", "model.encoder.language_model.")
                tensors[copy] = tensors[name].clone()
        tensors["lm_head.weight"] = tensors[HEAD].clone()

    expected = DiffusionGemma.from_pretrained(folder)
    edit(folder, write_out_the_ties)
    assert same_weights(expected, DiffusionGemma.from_pretrained(folder))
    edit(folder, lambda tensors: tensors.pop(HEAD))  # one name is enough
    assert same_weights(expected, DiffusionGemma.from_pretrained(folder))


def test_copies_that_differ_from_their_tie_are_refused_by_name(folder):
    norm = "model.encoder.language_model.norm.weight"

    def untie(tensors):
        tensors["lm_head.weight"] = tensors[HEAD] + 1
        tensors[norm] = tensors["model.decoder.norm.weight"] + 1

    edit(folder, untie)
    with pytest.raises(ValueError, match=rf"differ from .* tied to: lm_head\.weight, {norm}"):
        DiffusionGemma.from_pretrained(folder)


def test_scalars_that_differ_between_the_modes_are_kept_apart_with_one_warning(folder, caplog):
    DiffusionGemma.from_pretrained(folder)
    assert not caplog.records
    edit(folder, lambda t: t["model.encoder.language_model.layers.1.layer_scalar"].fill_(0.5))
    model = DiffusionGemma.from_pretrained(folder)
    assert (model.layers[1].layer_scalar.item(), model.layers[1].causal_layer_scalar.item()) == (1.0, 0.5)
    assert ["layers.1.layer_scalar" in record.getMessage() for record in caplog.records] == [True]


def test_towers_that_the_model_does_not_have_are_skipped_with_one_log_line(folder, caplog):
    """A config without a vision tower, as of a text-only model that transformers saved, and Gemma 4's audio tower."""
    expected = DiffusionGemma.from_pretrained(folder)
    towers = {"model.encoder.vision_tower.std_bias": torch.ones(3), "model.audio_tower.x": torch.ones(2)}
    edit(folder, lambda t: t.update(towers))
    assert same_weights(expected, DiffusionGemma.from_pretrained(folder))
    assert ["2 tensors of towers" in record.getMessage() for record in caplog.records] == [True]


def test_a_model_without_vision_leaves_the_tower_out_and_has_the_same_other_weights(tmp_path):
    model = DiffusionGemma(presets.tiny(vision=True))
    model.save_pretrained(tmp_path)
    blind = DiffusionGemma.from_pretrained(tmp_path, vision=False).state_dict()
    assert blind.keys() == {name for name in model.state_dict() if not name.startswith("vision.")}
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in blind.items())


def test_a_checkpoint_without_vision_tensors_has_no_tower_and_one_with_some_must_have_all(tmp_path):
    model = DiffusionGemma(presets.tiny(vision=True))
    model.save_pretrained(tmp_path)
    assert same_weights(model, DiffusionGemma.from_pretrained(tmp_path))
    edit(tmp_path, lambda t: t.pop("model.encoder.vision_tower.std_bias"))
    with pytest.raises(ValueError, match=r"missing model\.encoder\.vision_tower\.std_bias"):
        DiffusionGemma.from_pretrained(tmp_path)
    edit(tmp_path, lambda t: [t.pop(name) for name in list(t) if "vision" in name])
    assert DiffusionGemma.from_pretrained(tmp_path).vision is None


def test_everything_that_does_not_fit_is_named_in_one_error(folder):
    def spoil(tensors):
        del tensors["model.decoder.norm.weight"]
        del tensors["model.encoder.language_model.layers.2.layer_scalar"]
        tensors["model.decoder.layers.9.surprise"] = torch.ones(1)
        tensors["model.decoder.layers.0.router.scale"] = torch.ones(3)
        tensors["model.decoder.layers.1.router.scale"] = torch.ones(16, dtype=torch.int8)

    edit(folder, spoil)
    with pytest.raises(ValueError) as error:
        DiffusionGemma.from_pretrained(folder)
    assert set(str(error.value).split("\n  ")) == {
        "The checkpoint does not fit its config.json:",
        "missing model.decoder.norm.weight",
        "missing model.encoder.language_model.layers.2.layer_scalar",
        "unexpected model.decoder.layers.9.surprise",
        "misshapen model.decoder.layers.0.router.scale: (3,), not (16,)",
        "unreadable model.decoder.layers.1.router.scale: stored as I8, not as a float",
    }


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "num_experts", "head_dim", "num_key_value_heads", "num_global_key_value_heads"],
)
def test_a_config_that_does_not_fit_its_tensors_is_refused(folder, field):
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit_json(folder / "config.json", text_config=text | {field: 2 * getattr(TINY, field)})
    with pytest.raises(ValueError, match=r"does not fit its config\.json:\n  misshapen model\.decoder\."):
        DiffusionGemma.from_pretrained(folder)


@pytest.mark.parametrize("keep", [0, 4, 300, -1], ids=["empty", "no-header", "header-cut", "last-byte"])
def test_a_truncated_file_is_refused(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        DiffusionGemma.from_pretrained(folder)


def test_missing_shards_are_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1:3]
    for file in gone:
        file.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks the shards {gone[0].name}, {gone[1].name}"):
        DiffusionGemma.from_pretrained(sharded)


OUTSIDE = ("../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\a.safetensors")


@pytest.mark.parametrize("file", [*OUTSIDE, "a.bin", "", 7, None])
def test_an_index_may_only_name_safetensors_of_its_own_folder(sharded, file):
    elsewhere = sharded.parent / "model.safetensors"
    save_file({HEAD: torch.ones(128, 16)}, elsewhere)
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {HEAD: file})
    with pytest.raises(ValueError, match="must name safetensors files of its own folder"):
        DiffusionGemma.from_pretrained(sharded)


def test_an_index_that_contradicts_its_shards_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    last = max(weight_map.values())
    assert weight_map[HEAD] != last
    edit_json(index, weight_map=weight_map | {HEAD: last})
    with pytest.raises(ValueError, match=f"not there: {HEAD} in {last}"):
        DiffusionGemma.from_pretrained(sharded)


def test_a_tensor_stored_twice_is_refused(sharded):
    last = max(sharded.glob("*.safetensors"))
    save_file(load_file(last) | {HEAD: torch.ones(128, 16)}, last)
    with pytest.raises(ValueError, match=f"repeats {HEAD}"):
        DiffusionGemma.from_pretrained(sharded)


def test_pickled_weights_are_never_opened(folder):
    class Trap:
        def __reduce__(self):
            return Path.touch, (folder / "ran",)

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(FileNotFoundError, match="never pickles"):
        DiffusionGemma.from_pretrained(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")
    with pytest.raises(ValueError, match="damaged"):
        DiffusionGemma.from_pretrained(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2**31 - 1, "layer_types": None},  # would build two billion layers
        {"num_experts": 2**31 - 1, "moe_intermediate_size": 2**31 - 1},  # more elements than 64 bits count
        {"vocab_size": 2**40},
        {"hidden_size": 24},  # plausible, but not what the file holds
        {"rope_parameters": [1]},
        {"per_layer_config": {"2": []}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_hostile_sizes_and_values_are_refused_at_once(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError):
        DiffusionGemma.from_pretrained(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\x80"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_broken_json_is_refused_by_file(sharded, file, text):
    (sharded / file).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{file} (is not valid JSON|must hold a JSON object|must be UTF-8)"):
        DiffusionGemma.from_pretrained(sharded)


class Killed(BaseException):
    """Stands for a process that ends here."""


THREE_SHARDS = 75_000  # bytes


@pytest.mark.slow
@pytest.mark.parametrize("new_limit", ["5GB", THREE_SHARDS], ids=["to-single", "to-sharded"])
@pytest.mark.parametrize("old_limit", ["5GB", THREE_SHARDS], ids=["from-single", "from-sharded"])
def test_a_save_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new(tmp_path, monkeypatch, old_limit, new_limit):
    """The moments: in the middle of a weight file, then before each change of a name in the folder."""
    old, new = random_model(seed=1), random_model(seed=2)
    outcomes = []
    for moment in range(100):
        folder = tmp_path / str(moment)
        old.save_pretrained(folder, max_shard_size=old_limit)
        done = []

        def killing(change, moment=moment, done=done):
            def run(*args, **kwargs):
                done.append(change)
                if len(done) == moment:
                    raise Killed
                return change(*args, **kwargs)

            return run

        def cut_short(tensors, file, metadata):
            save_file(tensors, file, metadata=metadata)
            file.write_bytes(file.read_bytes()[:-7])
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killing(os.replace))
            patch.setattr(Path, "unlink", killing(Path.unlink))
            if moment == 0:
                patch.setattr("safetensors.torch.save_file", cut_short)
            try:
                new.save_pretrained(folder, max_shard_size=new_limit)
                break
            except Killed:
                pass
        loaded = DiffusionGemma.from_pretrained(folder)
        outcomes.append(same_weights(loaded, new))
        assert outcomes[-1] or same_weights(loaded, old)

        new.save_pretrained(folder, max_shard_size=new_limit)  # the next save is complete and leaves no temporary files
        assert same_weights(DiffusionGemma.from_pretrained(folder), new)
        assert not list(folder.glob("*.new"))
        index = folder / "model.safetensors.index.json"
        named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        assert {file.name for file in folder.glob("*.safetensors")} == named
        assert len(named) == (1 if new_limit == "5GB" else 3)
    outcomes.append(same_weights(DiffusionGemma.from_pretrained(folder), new))  # the last save was not killed
    assert outcomes == sorted(outcomes), "once the new checkpoint is active it stays active"
    assert set(outcomes) == {False, True}


def test_saving_leaves_other_files_alone(folder):
    (folder / "optimizer.safetensors").write_bytes(b"mine")
    (folder / "tokenizer.json").write_text("{}")
    random_model(seed=5).save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "optimizer.safetensors").read_bytes() == b"mine"
    assert (folder / "tokenizer.json").exists()


def test_hub_ids_fetch_only_what_is_read(monkeypatch, folder):
    asked = {}

    def snapshot_download(repo, allow_patterns):
        asked[repo] = allow_patterns
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    DiffusionGemma.from_pretrained("someone/some-model")
    assert asked == {"someone/some-model": ["*.safetensors", "*.json", "*.jinja"]}


def test_an_unreachable_hub_is_one_error_with_its_cause(monkeypatch):
    not_kept = LocalEntryNotFoundError("Got: a paragraph")
    not_kept.__cause__ = ConnectionError("no route")
    for error, fix in ((ConnectionError("no route"), ""), (not_kept, r"\. Connect to the network, or pass a")):
        monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
        with pytest.raises(FileNotFoundError, match=f"is no folder here, and the hub did not send it: no route{fix}"):
            resolve("someone/some-model")


@pytest.mark.parametrize("size", ["5TB", "-1GB", "²GB"])
def test_a_shard_of_no_known_size_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes, or a text such as '5GB'"):
        random_model().save_pretrained(tmp_path, max_shard_size=size)


@pytest.mark.parametrize(
    "name", ["missing", "/missing/folder", "a/b/c", "../x", "~ghost", "http://host/x", Path("a/b")]
)
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name):
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub id"):
        resolve(name)


@pytest.fixture
def assets(monkeypatch, tmp_path):
    """A folder of shipped checkpoints: "text", and "text-mask" without weights and tokenizer."""
    assets = tmp_path / "assets"
    monkeypatch.setattr("dgemma.location.ASSETS", assets)
    model = random_model()
    model.save_pretrained(assets / "text")
    ByteTokenizer().save_pretrained(assets / "text")
    model.generation = replace(model.generation, noise={"kind": "mask", "mask_token_id": 4}, max_denoising_steps=9)
    model.save_pretrained(assets / "text-mask")
    (assets / "text-mask" / "model.safetensors").unlink()
    return assets


def test_a_shipped_twin_has_its_own_defaults_and_the_weights_and_tokenizer_of_another(assets, tmp_path):
    model, twin = (DiffusionGemma.from_pretrained(f"dgemma/{name}") for name in ("text", "text-mask"))
    assert same_weights(model, twin)

    assert twin.generation == replace(model.generation, noise=twin.generation.noise, max_denoising_steps=9)
    assert twin.generation.noise == {"kind": "mask", "mask_token_id": 4}
    assert Tokenizer.from_pretrained("dgemma/text-mask").encode("a") == ByteTokenizer().encode("a")
    assert (
        read_checkpoint("dgemma/text-mask", files=["config.json"]).contents.stored.keys()
        == read_headers(assets / "text").keys()
    )
    twin.save_pretrained(tmp_path / "saved")  # a new folder, with weights
    assert same_weights(DiffusionGemma.from_pretrained(tmp_path / "saved"), twin)


def test_a_folder_of_a_user_never_takes_the_weights_of_another(assets, tmp_path):
    (assets / "text-mask").rename(tmp_path / "text-mask")  # with its name, but not among the shipped ones
    with pytest.raises(FileNotFoundError, match=r"text-mask holds neither model\.safetensors"):
        DiffusionGemma.from_pretrained(tmp_path / "text-mask")


def test_shipped_checkpoints_load_in_float32_by_default():
    # They are stored in bfloat16, which most CPUs multiply slowly.
    assert DiffusionGemma.from_pretrained("dgemma/sudoku").dtype == torch.float32
    assert DiffusionGemma.from_pretrained("dgemma/sudoku", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_ctrl_c_while_weights_are_read_is_a_keyboard_interrupt(tmp_path):
    # torch turns an interrupt into "could not determine the shape of object type 'torch.storage.UntypedStorage'".
    save_file({f"t{i}": torch.zeros(64, 64) for i in range(400)}, tmp_path / "x.safetensors")

    def read_forever(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with files.open_tensors(tmp_path / "x.safetensors") as tensors:
            while True:
                tensors.get_tensor("t7")

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for delay in range(40):
            with pytest.raises(KeyboardInterrupt):
                read_forever(0.001 + delay * 2e-5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
