"""Frames hold a row after each step; `settled` is the step at which each position became final."""

import numpy as np
import pytest
import torch

import dgemma
from dgemma.model.vision.images import Images
from dgemma.view.frames import read_frames, read_prompt, read_prompt_tokens, settled
from dgemma.view.pieces import Pieces
from view.converging import record, writer_of


def test_a_row_has_every_blocks_noise_and_then_its_own_steps(recorded):
    out, _ = recorded
    for row in range(2):
        frames = read_frames(out.trajectory, row, owner="to_html")
        steps = out.steps[row].tolist()
        assert frames.step.tolist() == [*range(-1, steps[0]), *range(-1, steps[1])]
        assert frames.block.tolist() == [0] * (steps[0] + 1) + [1] * (steps[1] + 1)
        first = out.trajectory.at(block=0, step=0)
        assert frames.canvas[0].tolist() == first.canvas[row].tolist()
        assert frames.canvas[1].tolist() == first.next_canvas[row].tolist()
        assert frames.entropy[0].max() == 0
        assert np.array_equal(frames.entropy[1], first.entropy[row].numpy())


@pytest.mark.parametrize(("length", "text"), [(9, "Hi <|image><|image|><image|>!"), (2, "… <image|>!")])
def test_a_picture_takes_one_place_in_the_text_of_a_prompt(length, text):
    tokenizer = dgemma.ByteTokenizer()
    model, images = writer_of("A cat.", tokenizer, 8)[0], Images(torch.zeros(18, 768, dtype=torch.uint8), ((3, 6),), 3)
    prompt = tokenizer.place_images(tokenizer.encode("Hi <|image|>!"), images)
    assert prompt.count(tokenizer.token_id("<|image|>")) == 2
    out = dgemma.generate(model, torch.tensor([prompt]), max_new_tokens=8, steps=1, record=True)
    assert read_prompt(out.trajectory, 0, Pieces(tokenizer), num_tokens=length) == text


def test_a_prompt_that_is_only_in_the_cache_is_not_in_the_frames():
    model, tokens = dgemma.DiffusionGemma(dgemma.presets.tiny()), torch.tensor([[2, 9, 8]])
    seen = {"cache": model.encode(tokens), "attention_mask": torch.ones_like(tokens)}
    out = dgemma.generate(model, tokens[:, :0], max_new_tokens=32, steps=1, record=True, **seen)
    assert read_prompt_tokens(out.trajectory, 0) == []


def test_the_text_ends_at_its_stop_token_and_the_draft_after_it_is_kept(recorded):
    out, tokenizer = recorded
    frames = read_frames(out.trajectory, 0, owner="to_html")
    written = frames.final.ravel()[: sum(frames.kept)]
    assert frames.kept[0] == 64
    assert written[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(written) == tokenizer.decode(out.new_tokens[0])
    assert (frames.final[1, frames.kept[1] :] == tokenizer.eos_token_id).all()


def test_settled_is_the_step_after_which_a_position_no_longer_changes(recorded):
    out, _ = recorded
    frames = read_frames(out.trajectory, 1, owner="to_html")
    steps = settled(frames)
    for block, position in [(0, 0), (0, 17), (1, 3), (1, 60)]:
        history = [
            int(step.next_canvas[step.rows.tolist().index(1), position])
            for step in out.trajectory
            if step.block == block and 1 in step.rows.tolist()
        ]
        at = steps[block, position]
        assert set(history[at:]) == {frames.final[block, position]}
        assert at == 0 or history[at - 1] != frames.final[block, position]


@pytest.mark.parametrize("tail", [None, 1], ids=["free", "given"])
def test_padding_of_a_canvas_is_not_text(tail):
    model, ids = writer_of("A text of eighteen", dgemma.ByteTokenizer(), 32)
    text = torch.tensor([[2, *ids[:15], 200, 200, 200]])  # it ends with the same token three times
    out = dgemma.infill(model, text, [(3, 9)], tail_token_id=tail, steps=3, record=True, progress=False)
    (trajectory,) = out.trajectories
    frames = read_frames(trajectory, 0, owner="to_html")
    assert frames.kept == [18]  # all but the first token, which is the prefix
    assert frames.final[0, :18].tolist() == out.tokens[0, 1:].tolist()
    forked = trajectory.fork(model, step=1)
    assert torch.equal(forked.new_tokens[:, :18], out.tokens[:, 1:])
    assert (forked.new_tokens[:, 18:] == model.generation.pad_token_id).all()
    assert forked.cache.lengths.tolist() == [19]
    assert trajectory.difference(trajectory.replay(model)) is None


def test_a_frozen_end_of_equal_tokens_is_text():
    canvas = torch.full((1, 32), -1)
    canvas[0, 20:] = 200
    out, _ = record("A text of eighteen", canvas_len=32, canvas=canvas, frozen=canvas >= 0, eos_token_ids=())
    assert read_frames(out.trajectory, 0, owner="to_html").kept == [32]


def test_frozen_positions_come_from_the_plan_and_from_callbacks():
    canvas = torch.full((2, 32), -1)
    canvas[1, 5] = 200

    def freeze(step):
        if int(step.step[0]) == 2:
            frozen = step.state.frozen.clone()
            frozen[:, 9] = True
            return {"frozen": frozen}
        return None

    out, _ = record(
        "Pins of two kinds, in one canvas.", rows=2, canvas_len=32, canvas=canvas, frozen=canvas >= 0, on_step=freeze
    )
    frames = read_frames(out.trajectory, 1, owner="to_html")
    assert np.flatnonzero(frames.frozen[frames.step == 1][0]).tolist() == [5]
    assert np.flatnonzero(frames.frozen[frames.step == 3][0]).tolist() == [5, 9]
    assert not read_frames(out.trajectory, 0, owner="to_html").frozen[1].any()
    assert not frames.undecided[frames.block == 0, 5].any()
