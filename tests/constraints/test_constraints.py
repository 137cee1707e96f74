"""Constraints in runs: every text is in its language, over blocks, per row and in holes; failures are explained."""

import dataclasses
import json
import random
import re
import resource
import time
from decimal import Decimal

import pytest
import torch

import dgemma
from constrained_fuzz import CANVAS_LEN, RandomModel, run_case
from dgemma.constraints import build, token_automaton
from dgemma.constraints.builder import read_pattern
from dgemma.diffusion.prediction import Prediction

pytest.importorskip("outlines_core")
pytest.importorskip("lark")

TOKENIZER = dgemma.ByteTokenizer()
MODEL = RandomModel(TOKENIZER.vocab_size, seed=0, scale=3.0)
PROMPT = torch.full((2, 1), 2)
MASK = dgemma.MaskNoise(TOKENIZER.vocab_size)


def generate(constraint, **options):
    settings = {"max_new_tokens": CANVAS_LEN, "steps": 3, "noise": MASK, "sampler": dgemma.EntropyBound()}
    settings |= {"eos_token_ids": 1, "progress": False} | options
    model, prompt = settings.pop("model", MODEL), settings.pop("prompt", PROMPT)
    return dgemma.generate(model, prompt, constraint=constraint, **settings)


def texts(out):
    rows = out.new_tokens.tolist()
    return [TOKENIZER.decode(row[: row.index(1)] if 1 in row else row, skip_special=False) for row in rows]


def test_a_text_may_be_shorter_than_a_canvas_or_span_several():
    long = dgemma.Regex("[ab]{40,44}!", TOKENIZER)
    for text in texts(generate(long, max_new_tokens=3 * CANVAS_LEN)):
        assert re.fullmatch("[ab]{40,44}!", text)
    assert set(texts(generate(dgemma.Choice(["yes", "no"], TOKENIZER)))) <= {"yes", "no"}


class Endless(RandomModel):
    """Almost never predicts the stop token."""

    def denoise(self, *args, **options):
        logits = super().denoise(*args, **options).logits
        return Prediction(logits - 1e3 * (torch.arange(self.vocab_size) == 1))


@pytest.mark.parametrize("sampler", [dgemma.EntropyBound(), dgemma.Ancestral()])
@pytest.mark.parametrize("length", [2, CANVAS_LEN - 1, CANVAS_LEN + 1, CANVAS_LEN + 2])
def test_a_text_ends_within_max_new_tokens_if_one_can(sampler, length):
    whole = 2 * CANVAS_LEN if length > CANVAS_LEN else CANVAS_LEN
    both = [dgemma.Regex("[a-z]{2,50}", TOKENIZER), dgemma.Regex(f"[a-z]{{{whole}}}", TOKENIZER)]
    model = Endless(TOKENIZER.vocab_size, seed=0, scale=3.0)
    first, second = texts(generate(both, model=model, max_new_tokens=length, sampler=sampler))
    assert 2 <= len(first) <= length
    assert len(second) == whole  # such a text needs whole canvases


def test_positions_after_the_end_of_a_text_do_not_delay_a_run():
    # The text is certain. The random predictions after its end change at every step.
    only = dgemma.Choice(["yes"], TOKENIZER)
    uniform = dgemma.UniformNoise(TOKENIZER.vocab_size)
    out = generate(only, noise=uniform, stop=dgemma.StableAndConfident(stability=1), steps=9)
    assert texts(out) == ["yes", "yes"]
    assert out.steps.tolist() == [[2], [2]]  # stability needs a second step
    assert generate(only, steps=9).steps.tolist() == [[1], [1]]


def test_each_row_may_have_its_own_constraint():
    digits, letters = dgemma.Regex("[0-9]{3}", TOKENIZER), dgemma.Regex("[a-z]{2}", TOKENIZER)
    both = generate([digits, letters])
    assert re.fullmatch("[0-9]{3}", texts(both)[0])
    assert re.fullmatch("[a-z]{2}", texts(both)[1])


def test_a_dataclass_is_a_schema():
    pytest.importorskip("pydantic")

    @dataclasses.dataclass
    class Point:
        x: int
        y: int

    for text in texts(generate(dgemma.JsonSchema(Point, TOKENIZER), max_new_tokens=2 * CANVAS_LEN)):
        assert {type(value) for value in json.loads(text).values()} == {int}


def test_frozen_and_allowed_tokens_compose_with_a_constraint():
    canvas = torch.full((2, 3), -1)
    canvas[:, 1] = TOKENIZER.encode("7", bos=False)[0]
    allowed = torch.zeros(TOKENIZER.vocab_size, dtype=torch.bool)
    allowed[[1, *TOKENIZER.encode("579", bos=False)]] = True
    constraint = dgemma.Regex("[0-9]{3,5}", TOKENIZER)
    for text in texts(generate(constraint, canvas=canvas, frozen=canvas >= 0, allowed=allowed)):
        assert re.fullmatch("[579]7[579]{1,3}", text)


def test_a_part_of_a_text_can_be_constrained():
    fenced = dgemma.Choice(["left", "right"], TOKENIZER).within(before="[a-z ]{1,3}<", after=">")
    for text in texts(generate(fenced)):
        assert re.fullmatch("[a-z ]{1,3}<(left|right)>", text)


def test_tool_calls_are_parsed_back():
    tool = {
        "name": "set_alarm",
        "parameters": {
            "type": "object",
            "properties": {"label": {"type": "string", "maxLength": 4}, "hour": {"type": "integer", "maximum": 9}},
            "required": ["label", "hour"],
        },
    }
    out = generate(dgemma.ToolCalls([tool], TOKENIZER), max_new_tokens=4 * CANVAS_LEN)
    for row in out.new_tokens:
        (call,) = TOKENIZER.reply(row).tool_calls
        assert call.name == "set_alarm"
        assert call.arguments is not None
        assert len(call.arguments["label"]) <= 4
        assert call.arguments["hour"] <= 9


def test_a_grammar_is_expanded_to_its_depth():
    llguidance = pytest.importorskip("llguidance")
    source = 'start: NUMBER | "(" start "+" start ")"\nNUMBER: /[0-9]/'
    constraint = dgemma.Grammar(source, TOKENIZER, depth=2)
    assert llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("lark", source), None) == ""
    accepted = [text for text in ("1", "(1+2)", "((1+2)+3)", "(((1+2)+3)+4)", "(1+") if fits(constraint, text)]
    assert accepted == ["1", "(1+2)", "((1+2)+3)"]


@pytest.mark.parametrize(
    ("constraint", "accepted"),
    [
        (lambda: dgemma.Grammar('start: "a.b+"i', TOKENIZER), ["a.b+", "A.B+"]),
        (lambda: dgemma.Grammar("start: A A\nA: /(?P<name>a)/", TOKENIZER), ["aa"]),
        (lambda: dgemma.JsonSchema({"items": {"pattern": "^(?<name>a)$"}}, TOKENIZER), ['["a","a"]']),
        (lambda: dgemma.JsonSchema({"prefixItems": [{"title": "any"}, {"const": (1,)}]}, TOKENIZER), ['["a",[1]]']),
    ],
    ids=["literal", "repeated-terminal", "repeated-pattern", "annotated"],
)
def test_only_texts_of_the_source_are_accepted(constraint, accepted):
    built = constraint()
    assert [text for text in ("a.b+", "A.B+", "axb+", "aa", '["a","a"]', '["a",[1]]') if fits(built, text)] == accepted


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ('start: "a" b\nb: "(" b ")"', "'b', 'start'"),
        ('start: "a" | x\nx: "(" y\ny: x ")"', "'x', 'y'"),
        ('start: "a" start', "'start'"),
    ],
)
def test_rules_that_never_end_are_named(grammar, rule):
    with pytest.raises(ValueError, match=rf"Grammar\.grammar must have rules whose texts can end, got \[{rule}\]"):
        dgemma.Grammar(grammar, TOKENIZER)


def fits(constraint, text):
    automaton, state = constraint.automaton, 0
    for token in TOKENIZER.encode(text, bos=False):
        state = automaton.next_state[state, automaton.token_class[token]] if state >= 0 else -1
    return state >= 0 and bool(automaton.is_final[state])


def test_holes_become_texts_of_the_language():
    model = dgemma.DiffusionGemma(dgemma.presets.tiny()).eval()
    ids = [4 if char == "_" else TOKENIZER.encode(char, bos=False)[0] for char in "on ____-__, " * 4]
    tokens = torch.tensor([[2, *ids]])
    options = {"steps": 2, "noise": dgemma.MaskNoise(512), "progress": False}
    out = dgemma.infill(model, tokens, 4, constraint=dgemma.Regex("[0-9]+", TOKENIZER), **options)
    assert re.fullmatch("(on [0-9]{4}-[0-9]{2}, ){4}", TOKENIZER.decode(out.tokens[0]))
    with pytest.raises(ValueError, match=r"which no text has in row 0, got \[2, 4\]"):
        dgemma.infill(model, tokens, 4, constraint=dgemma.Regex("[0-9]{3}", TOKENIZER), **options)


def test_a_recorded_run_is_replayed_with_its_constraint(tmp_path):
    out = generate(dgemma.Regex("[ab]{20,30}", TOKENIZER), max_new_tokens=2 * CANVAS_LEN, record=True)
    out.trajectory.save(tmp_path / "run.safetensors")
    again = dgemma.Trajectory.load(tmp_path / "run.safetensors").replay(MODEL)
    assert torch.equal(again.new_tokens, out.new_tokens)
    assert all(re.fullmatch("[ab]{20,30}", text) for text in texts(again))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgemma.Regex("a(", TOKENIZER).automaton, "must be a regular expression"),
        (lambda: dgemma.Regex("a)(b", TOKENIZER).automaton, "must open each bracket that it closes"),
        (lambda: dgemma.Grammar("%declare A\nstart: A", TOKENIZER), r"the terminals that it declares, got \['A'\]"),
        (lambda: dgemma.Regex("[a&&b]", TOKENIZER).automaton, "it matches no text"),
        (lambda: dgemma.JsonSchema({"not": {}}, TOKENIZER), "got 'not'"),
        (lambda: dgemma.JsonSchema({"type": "integer", "minimum": 3, "maximum": 2}, TOKENIZER), "no value fits"),
        (lambda: generate(dgemma.Regex("a{99}", TOKENIZER)), "at least 99 tokens for 16 in row 0"),
        (lambda: generate([dgemma.Regex("a", TOKENIZER)]), r"a list of 2 values or Nones"),
        (
            lambda: generate(
                dgemma.Regex("[ab]+", TOKENIZER),
                canvas=torch.full((2, 2), 200),
                frozen=torch.tensor([[False, True]] * 2),
            ),
            "must .* agree with frozen and allowed, got .* in row 0",
        ),
    ],
)
def test_a_constraint_that_cannot_be_met_is_explained(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_constraint_for_another_tokenizer_is_refused():
    other = dgemma.Regex("[a-z]+", dgemma.Tokenizer.from_pretrained("dgemma/text"))
    with pytest.raises(ValueError, match=r"must be built with the model's tokenizer.*at most 384 tokens.*got 8192"):
        generate(other)
    model = RandomModel(8192, seed=0, scale=3.0)
    with pytest.raises(ValueError, match=r"must be built with the model's tokenizer.*at most 8192 tokens.*got 384"):
        dgemma.generate(model, PROMPT, constraint=dgemma.Regex("[a-z]+", TOKENIZER), noise=dgemma.MaskNoise(8192))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dgemma.JsonSchema({"type": "string", "maxLength": 20_000}, TOKENIZER), "got a longer repetition"),
        (lambda: dgemma.JsonSchema({"enum": ["abcdefgh" * 3_000]}, TOKENIZER), "got 24004 states"),
        (lambda: dgemma.Grammar(CALLS_FOUR_TIMES, TOKENIZER), "must expand to at most 10000000 characters"),
        (lambda: dgemma.Grammar('start: "a" start "b" | "c"', TOKENIZER, depth=10**9), "must nest less deep"),
        (lambda: dgemma.JsonSchema(REFERS_TO_ITSELF, TOKENIZER, depth=10**9), "must nest less deep"),
        (lambda: dgemma.JsonSchema("[" * 100_000, TOKENIZER), "must nest less deep"),
        (lambda: dgemma.JsonSchema({"enum": [nested(100_000)]}, TOKENIZER), "must nest less deep"),
        (lambda: dgemma.Grammar(f"start: {'(' * 100_000}", TOKENIZER), "must have at most 100000 characters"),
        (lambda: dgemma.Regex("[" * 100_000, TOKENIZER), "unterminated character set"),
        (lambda: dgemma.Regex("(" * 100_000 + ")" * 100_000, TOKENIZER), "must be a regular expression"),
        (lambda: dgemma.JsonSchema({"pattern": "[" * 100_000}, TOKENIZER), "empty or open brackets"),
    ],
)
def test_what_would_take_gigabytes_or_minutes_is_refused_quickly(make, message):
    start = time.process_time()
    with pytest.raises(ValueError, match=message):
        make().automaton  # noqa: B018
    assert time.process_time() - start < 3


CALLS_FOUR_TIMES = "start: r0\n" + "\n".join(f"r{i}: {f'r{i + 1} ' * 4}" for i in range(15)) + '\nr15: "a"'
REFERS_TO_ITSELF = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_long_text_is_built_within_the_memory_that_is_promised():
    text = "".join(random.Random(0).choices("abcdefgh ", k=18_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    automaton = dgemma.JsonSchema({"enum": [text]}, dgemma.Tokenizer.from_pretrained("dgemma/text")).automaton
    assert automaton.num_states == 18_003  # two quotes and the end
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_spelling_is_bounded_while_it_grows(monkeypatch):
    read = read_pattern("(?:abc)*")
    for name, most in (("_MOST_LOOKUPS", 3), ("_MOST_CELLS", 3), ("_MOST_LINKS", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(token_automaton, name, most)
            with pytest.raises(token_automaton.TooLarge):
                token_automaton.spell_tokens(read, [b"a", b"b", b"c", b"ab"])
    assert token_automaton.spell_tokens(read, [b"a", b"b", b"c", b"ab"]).num_states == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: dgemma.Regex("(a|b)*a(a|b){25}", TOKENIZER),
        lambda: dgemma.JsonSchema({"type": "string", "pattern": ".*a.{30}"}, TOKENIZER),
        lambda: dgemma.Grammar('start: LETTER* "a" TAIL\nLETTER: /[ab]/\nTAIL: /[ab]{30}/', TOKENIZER),
        lambda: dgemma.Regex("x.{30}", TOKENIZER).within(),
    ],
    ids=["regex", "schema", "grammar", "within"],
)
def test_an_automaton_with_billions_of_states_is_refused_within_the_limits(make, monkeypatch):
    monkeypatch.setattr(build, "SECONDS", 1)
    with pytest.raises(ValueError, match=r"at most 20000 states, built in 1 s and 1 GiB, got more time or memory"):
        make().automaton  # noqa: B018


@pytest.mark.parametrize("pattern", ["x[^y]{0,200}y", "x.{0,200}x", r"\n\s{0,200}\n", r"0\D{0,200}0", '"[^"]{0,200}"'])
def test_long_repetitions_are_built_at_once_even_if_the_text_could_begin_inside_them(pattern):
    automaton = read_pattern(pattern)
    first, last = pattern[0].replace("\\", "\n"), pattern[-1].replace("n", "\n")
    for length, fits in ((0, True), (200, True), (201, False)):
        state = 0
        for byte in f"{first}{' ' * length}{last}".encode():
            state = automaton.next_state[state, byte] if state >= 0 else state
        assert bool(state >= 0 and automaton.is_final[state]) is fits


def test_anchors_are_refused():
    for pattern in ("^a", "a$|b", r"\Aa", r"(?:a|b\z)", r"(?-u:\b)a", r"(?-u:\B)a"):
        with pytest.raises(ValueError, match="must have no anchors"):
            dgemma.Regex(pattern, TOKENIZER).automaton  # noqa: B018
    for fine in (r"\^", "[$]", "[^a]", r"\\A", "[]^]"):
        dgemma.Regex(fine, TOKENIZER).automaton  # noqa: B018


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": 5}, "must be a JSON schema, got .*'int' object has no attribute"),
        ({"enum": 5}, "must be a JSON schema"),
        ({"enum": "yes"}, "must have a list as enum, got 'yes' at #"),
        ({"items": {"type": "object", "required": "ab"}}, "must have a list as required, got 'ab' at #/items"),
        ({"type": "integer", "minimum": 0.5}, "must have whole numbers as bounds"),
        ({"const": float("nan")}, "NaN is not a number of JSON"),
        ({"items": {"$ref": "#name"}, "$defs": {"a": {"$anchor": "name", "const": 1}}}, "refer only to parts"),
        ({"type": "integer", "minimum": "5"}, "must be a JSON schema"),
        ({"type": "object", "properties": ["a"]}, "must be a JSON schema"),
        (
            {
                "$defs": {"a": {"type": "object", "properties": {f"p{at}": {"$ref": "#/$defs/a"} for at in range(60)}}},
                "$ref": "#/$defs/a",
            },
            "must expand to at most 10000000 characters of patterns",
        ),
    ],
    ids=["pattern", "enum", "enum-text", "required-text", "half", "nan", "anchor", "text", "list", "references"],
)
def test_malformed_and_exploding_schemas_are_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        dgemma.JsonSchema(schema, TOKENIZER)


@pytest.mark.parametrize("other", [1.0, {"b": 2, "a": 1}], ids=["number", "object"])
def test_options_of_one_of_are_compared_as_json(other):
    one_of = {"oneOf": [{"enum": [1, {"a": 1, "b": 2}]}, {"const": other}]}
    with pytest.raises(ValueError, match="options that exclude each other"):
        dgemma.JsonSchema(one_of, TOKENIZER)
    assert re.fullmatch(dgemma.JsonSchema({"oneOf": [{"const": True}, {"const": 1}]}, TOKENIZER).pattern, "true")


@pytest.mark.parametrize("bound", [7, -7, 10**5, -(10**5), 10**13])
def test_no_number_within_exclusive_bounds_is_rounded_to_a_bound(bound):
    for keyword, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        pattern = dgemma.JsonSchema({"type": "number", keyword: bound}, TOKENIZER).pattern
        nearest = [f"{bound + Decimal(sign).scaleb(-places):f}" for places in range(1, 20)]
        matched = [text for text in nearest if re.fullmatch(pattern, text)]
        assert matched
        assert all((float(text) - bound) * sign > 0 for text in matched)


def test_a_string_without_a_possible_length_is_no_value():
    empty = {"type": "string", "minLength": 2, "maxLength": 1}
    assert dgemma.JsonSchema({"anyOf": [empty, {"type": "null"}]}, TOKENIZER).pattern == "null"


@pytest.mark.parametrize("kind", [("string", "Length"), ("array", "Items")])
def test_lengths_may_be_written_as_floats(kind):
    """JSON Schema: 2.0 is an integer, 2.5 is none."""
    name, unit = kind
    two, whole = ({"type": name, f"min{unit}": n, f"max{unit}": n} for n in (2.0, 2))
    assert dgemma.JsonSchema(two, TOKENIZER).pattern == dgemma.JsonSchema(whole, TOKENIZER).pattern
    for wrong in (2.5, -1, True, "2"):
        with pytest.raises(ValueError, match=f"whole number of at least 0 as max{unit}"):
            dgemma.JsonSchema({"type": name, f"max{unit}": wrong}, TOKENIZER)


def test_max_items_cuts_off_prefix_items():
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}, False], "maxItems": 1}
    pattern = dgemma.JsonSchema(schema, TOKENIZER).pattern
    assert re.fullmatch(pattern, "[1]")
    assert jsonschema.Draft202012Validator(schema).is_valid([1])
    assert not re.fullmatch(pattern, "[1, 2]")


# Quotes, escapes, control characters, line breaks, and characters that are in a class in only some of the standards.
TRICKY = ['"', "\\", "n", "a", "Z", "_", "0", "-", " ", "\n", "\x85", "\u0301", "½", "٣", "\u2028", "\ufeff", "😀"]
PATTERNS = [
    "^.{1,2}$",
    ".",
    "^[ -~]+$",
    "^[Z-a]$",
    r"^[\x20-\x7e]$",
    r"^[\u0021-\u0023a]$",
    "^[^a]$",
    r'^[^"\\\n]$',
    r"^[\[a&-]$",
    r"^[+-\-]$",
]
PATTERNS += [rf"^{name}$" for name in (r"\w", r"\W", r"\d", r"\D", r"\s", r"\S", r"[^\w]", r"[^\s-]", r"[\w-]")]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_text_of_a_schema_with_a_pattern_is_json_and_valid(pattern):
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "string", "pattern": pattern}
    automaton = read_pattern(dgemma.JsonSchema(schema, TOKENIZER).pattern)
    validator, num_texts, beginnings = jsonschema.Draft202012Validator(schema), 0, [(0, "")]
    for _ in range(6):
        ways = [(state, text + char) for state, text in beginnings[:300] for char in TRICKY]
        beginnings = []
        for state, text in ways:
            for byte in text[-1].encode():
                state = automaton.next_state[state, byte] if state >= 0 else state
            beginnings += [(state, text)] if state >= 0 else []
            if state >= 0 and automaton.is_final[state]:
                num_texts += 1
                assert validator.is_valid(json.loads(text)), text
    assert num_texts


@pytest.mark.parametrize(
    "pattern",
    ['"', r"\\", r"\b", r"\x{22}", "[]a]", "[b-a]", r"[\S]", "a$|b", "(?s:.)", "a++a", "(?=a)a", "a)|(?:b", "(a"],
)
def test_patterns_that_the_standards_read_differently_or_not_at_all_are_refused(pattern):
    with pytest.raises(ValueError, match=r"must have a pattern without .* at #\."):
        dgemma.JsonSchema({"type": "string", "pattern": pattern}, TOKENIZER)


@pytest.mark.slow
def test_random_languages_models_and_samplers_give_only_valid_texts():
    counts = sum((run_case(case, [TOKENIZER]) for case in range(60)), start=run_case(60, [TOKENIZER]))
    assert counts["cases"] > 40
