"""Write short dialogues by rule: questions with right answers, requests, tool calls, JSON from a sentence.

    python examples/text_corpus/dialogues.py --count 3 --seed 7 --kind sum

A dialogue is a list of messages, as chat templates take them, and perhaps tools. `as_text` renders one in the format of
`chat_template.jinja`. The phrases are in `dialogue_phrases.toml`, with the marks of `everyday.py`.
"""

import argparse
import json
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import everyday
from everyday import Scene

phrases: dict[str, Any] = tomllib.loads(Path(__file__).with_name("dialogue_phrases.toml").read_text("utf-8"))
Message = dict[str, Any]
OTHER_VALUES = 0.4  # probability that a value of a record is none of its list
CLOSED = {"weekday", "month", "season", "clock", "hour"}  # words that have no other values


@dataclass
class Dialogue:
    """Messages in turn, and the tools that the model may call."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, question: str, answer: str) -> None:
        """Add a turn of the user and the model's answer."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def turns(dialogue: Dialogue) -> list[tuple[str, str]]:
    """Return (prompt, answer) for each turn of the model, as `chat_template.jinja` renders them without <bos>."""
    text, found = "", []
    system = [m["content"] for m in dialogue.messages if m["role"] == "system"]
    if system or dialogue.tools:
        lines = [*system, *map(_declare, dialogue.tools)]
        text = "<|turn>system\n" + "\n".join(lines) + "<turn|>\n"
    for message in dialogue.messages:
        if message["role"] == "assistant":
            text += "<|turn>model\n"
            answer = "".join(map(_call, message.get("tool_calls", ()))) + (message["content"] or "") + "<turn|>"
            found.append((text, answer))
            text += answer + "\n"
        elif message["role"] == "tool":
            text += f"<|turn>tool\n<|tool_response>{message['content']}<tool_response|><turn|>\n"
        elif message["role"] == "user":
            text += f"<|turn>user\n{message['content']}<turn|>\n"
    return found


def as_text(dialogue: Dialogue) -> str:
    """Return the whole dialogue as running text."""
    return "".join(turns(dialogue)[-1])


def _declare(tool: dict[str, Any]) -> str:
    function = tool["function"]
    keys = (f"{key}:{value['type']}" for key, value in function["parameters"]["properties"].items())
    return f"<|tool>{function['name']}{{{','.join(keys)}}} {function['description']}<tool|>"


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    values = (
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{json.dumps(value)}"
        for key, value in function["arguments"].items()
    )
    return f"<|tool_call>call:{function['name']}{{{','.join(values)}}}<tool_call|>"


def _exchange(scene: Scene, pair: list[Any], dialogue: Dialogue) -> None:
    """Add a question and its answer; each is a template or a list of templates."""
    texts = []
    for part, speaker in zip(pair, ("me", "you"), strict=True):
        if scene.slots["h"].person in ("me", "you"):  # the user, who is "you" in the answer
            scene.meet("h", speaker)
        scene.clear.clear()
        texts.append(scene.expand(scene.pick(part) if isinstance(part, list) else part))
    dialogue.ask(*texts)


def small_talk(scene: Scene, dialogue: Dialogue) -> None:
    """Greet, chat about the day, say goodbye."""
    if scene.rng.random() < 0.7:
        _exchange(scene, scene.pick(phrases["hello"]), dialogue)
    for _ in range(scene.rng.randint(1, 2)):
        _exchange(scene, scene.pick(phrases["chat"]), dialogue)
    if scene.rng.random() < 0.4:
        _exchange(scene, scene.pick(phrases["goodbye"]), dialogue)


def arithmetic(scene: Scene, dialogue: Dialogue) -> None:
    """Ask sums, differences, products and quotients with small numbers."""
    for _ in range(scene.rng.choice((1, 1, 2))):
        kind = scene.rng.choice(("plus", "plus", "minus", "minus", "times", "divided"))
        a, b, c = _numbers(scene.rng, kind)
        scene.slots |= {"a": str(a), "b": str(b), "c": str(c)}
        _exchange(scene, [phrases["sums"][kind], phrases["sum_answers"][kind]], dialogue)


def _numbers(rng: random.Random, kind: str) -> tuple[int, int, int]:
    if kind in ("plus", "minus"):
        most = rng.choice((10, 20, 20, 50))
        a, b = rng.randint(0, most), rng.randint(0, most)
        return (a, b, a + b) if kind == "plus" else (a + b, b, a)
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return (a, b, a * b) if kind == "times" else (a * b, b, a)


def word_problem(scene: Scene, dialogue: Dialogue) -> None:
    """Ask a sum in words, about things that somebody has, buys or gives away."""
    scene.meet("h", "name")
    scene.meet("f", "name")
    kind = scene.rng.choice(list(phrases["problems"]))
    while True:
        a, b, c = _numbers(scene.rng, kind)
        if min(a, b, c) >= 2:
            break
    scene.slots |= {"a": str(a), "b": str(b), "c": str(c)}
    _exchange(scene, scene.pick(phrases["problems"][kind]), dialogue)


def compare(scene: Scene, dialogue: Dialogue) -> None:
    """Ask about numbers and words: which is larger, what comes next, opposites, plurals, letters."""
    rng = scene.rng
    a, b = sorted(rng.sample(range(1, 60), 2))
    word = rng.choice(everyday.phrases["words"]["thing"].split(", ")[:20])
    numbers = rng.sample(range(1, 40), 4)
    days = everyday.phrases["words"]["weekday"].split(", ")
    months = everyday.phrases["words"]["month"].split(", ")
    day, month = rng.randrange(7), rng.randrange(12)
    left, right = rng.choice(everyday.phrases["opposites"])
    noun, plural = rng.choice(list(everyday.phrases["plurals"].items()))
    verb, past = rng.choice([item for item in everyday.phrases["past"].items() if item[0] != "be"])
    scene.slots |= {"a": str(a), "b": str(b), "left": left, "right": right, "noun": noun, "nouns": plural}
    scene.slots |= {"verb": verb, "past": past, "word": word, "letters": str(len(word)), "first": word[0]}
    scene.slots |= {"last": word[-1], "spelled": "-".join(word.upper()), "next": str(a + 1), "before": str(a - 1)}
    scene.slots |= {"numbers": ", ".join(map(str, numbers)), "sorted": ", ".join(map(str, sorted(numbers)))}
    scene.slots |= {"largest": str(max(numbers)), "smallest": str(min(numbers)), "double": str(2 * a)}
    scene.slots |= {"day1": days[day], "day2": days[(day + 1) % 7], "day3": days[(day - 1) % 7]}
    scene.slots |= {"month1": months[month], "month2": months[(month + 1) % 12], "parity": "odd" if a % 2 else "even"}
    for _ in range(rng.choice((1, 1, 2))):
        _exchange(scene, scene.pick(phrases["compare"]), dialogue)


def fact(scene: Scene, dialogue: Dialogue) -> None:
    """Ask what something is, or about one of the small facts."""
    for _ in range(scene.rng.choice((1, 1, 2, 3))):
        topic = scene.pick(everyday.phrases["facts"])
        scene.slots["topic"] = topic["name"]
        if scene.rng.random() < 0.5:
            question, answer = scene.pick(topic["ask"])
            _exchange(scene, [question, answer], dialogue)
        elif scene.rng.random() < 0.4:
            _exchange(scene, [phrases["what_is"], scene.expand(topic["is"][0])], dialogue)
        else:
            sentences = scene.rng.sample(topic["say"], min(2, len(topic["say"])))
            _exchange(scene, [phrases["tell_about"], " ".join((topic["is"][0], *sentences))], dialogue)


def listing(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a few things of one kind."""
    kind, members = scene.pick(list(phrases["lists"].items()))
    count = scene.rng.randint(2, 5)
    chosen = scene.rng.sample(members.split(", "), count)
    number = ("two", "three", "four", "five")[count - 2]
    lines = "\n".join(f"{at}. {name[0].upper()}{name[1:]}" for at, name in enumerate(chosen, start=1))
    scene.slots |= {"kind": kind, "count": number, "items": ", ".join(chosen[:-1]) + " and " + chosen[-1]}
    scene.slots |= {"item": chosen[0], "lines": lines}
    _exchange(scene, scene.pick(phrases["list_requests"]), dialogue)


def tale(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a short story about an animal, a person or a thing."""
    scene.set(hero=phrases["heroes"])
    scene.slots["who"] = scene.slots["hero"][0]
    _exchange(scene, [phrases["tale_requests"], phrases["tales"]], dialogue)


def writing(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a text of the everyday kinds: a recipe, a letter, a forecast, directions, an opinion."""
    kind = scene.pick(list(phrases["write"]))
    scene.slots["scene"] = scene.words["name"]
    text = everyday.Scene(scene.rng, words=scene.words)
    everyday.KINDS[kind][0](text)
    scene.slots |= {name: text.slots[name] for name in ("meal", "to", "likes") if name in text.slots}
    dialogue.ask(scene.expand(scene.pick(phrases["write"][kind])), "\n\n".join(text.text))


def advice(scene: Scene, dialogue: Dialogue) -> None:
    """Ask what to do; the answers are things that people do in this scene."""
    for _ in range(scene.rng.choice((1, 1, 2))):
        _exchange(scene, scene.pick(phrases["advice"]), dialogue)


def unknown(scene: Scene, dialogue: Dialogue) -> None:
    """Ask what a small model cannot know or do."""
    _exchange(scene, scene.pick(phrases["unknown"]), dialogue)


def remember(scene: Scene, dialogue: Dialogue) -> None:
    """Tell the model something and ask for it a turn later."""
    scene.meet("h", "name")
    first, second = scene.pick(phrases["remember"])
    _exchange(scene, first, dialogue)
    if scene.rng.random() < 0.3:
        _exchange(scene, scene.pick(phrases["chat"]), dialogue)
    _exchange(scene, second, dialogue)


def _record(scene: Scene) -> tuple[dict[str, Any], str]:
    """Return a record and a sentence that contains all its values."""
    record = scene.pick(phrases["records"])
    scene.words = {**scene.words, "words": {**record.get("words", {}), **_other_values(scene.rng, record)}}
    scene.slots.clear()
    for slot in "hf":
        person = scene.meet(slot, "name")
        if scene.rng.random() < OTHER_VALUES:
            person.name = _invent_name(scene.rng)
    return record, scene.expand(scene.pick(record["say"]))


def _other_values(rng: random.Random, record: dict[str, Any]) -> dict[str, str]:
    """Return values for some of the words of a record that are not in their lists.

    From short lists a model learns the values by heart, and answers with one of them instead of copying a new one.
    """
    found, text = {}, json.dumps(record).lower()
    for name in sorted(set(re.findall(r"\[(\w+)\]", " ".join(record["fields"].values())))):
        of = record.get("words", {}).get(name) or everyday.phrases["words"].get(name)
        is_closed = name in CLOSED or f"[{name}." in text or not isinstance(of, str) or "[" in of or ";" in of
        if is_closed or rng.random() > OTHER_VALUES:
            continue
        value = rng.choice(of.split(", "))
        if value.lstrip("-").isdigit():
            found[name] = str(rng.randint(10 ** (len(value) - 1), 10 ** len(value) - 1))
        elif value[0].isupper():
            found[name] = _invent_name(rng)
        else:
            same_number = [noun for noun in _nouns() if noun.endswith("s") == value.endswith("s")]
            found[name] = ("the " if value.startswith("the ") else "") + rng.choice(same_number)
    return found


@cache
def _nouns() -> list[str]:
    """Return words that may stand after "a" or "the", from the lists."""
    lists = (of for name, of in phrases["lists"].items() if name not in ("adjectives", "verbs"))
    members = (member for of in lists for member in of.split(", "))
    return sorted({noun for member in members if re.fullmatch(r"[b-df-hj-np-tv-z][a-z]+", noun := member.split()[-1])})


def _invent_name(rng: random.Random) -> str:
    """Return a name of two to four syllables that is in no list."""
    starts, vowels, ends = (parts.split(", ") for parts in phrases["name_parts"])
    syllables = (rng.choice(starts) + rng.choice(vowels) for _ in range(rng.choice((2, 2, 3, 4))))
    return ("".join(syllables) + rng.choice(ends)).capitalize()


def reading(scene: Scene, dialogue: Dialogue) -> None:
    """Ask about a given paragraph; the answer is in it."""
    record, sentence = _record(scene)
    sentences = [sentence]
    for _ in range(scene.rng.randint(1, 3)):
        sentences.insert(scene.rng.randint(0, len(sentences)), scene.expand(scene.pick(phrases["fillers"])))
    scene.slots["paragraph"] = " ".join(sentences)
    asked = scene.rng.sample(record["ask"], min(len(record["ask"]), scene.rng.choice((1, 1, 2))))
    for number, (question, answer) in enumerate(asked):
        scene.slots["question"] = scene.expand(question)
        question = scene.pick(phrases["about_paragraph"]) if number == 0 else "[question]"
        dialogue.ask(scene.expand(question), scene.expand(answer))


def extraction(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for values of a sentence as JSON."""
    record, sentence = _record(scene)
    names = scene.rng.sample(
        list(record["fields"]), scene.rng.randint(min(2, len(record["fields"])), len(record["fields"]))
    )
    if scene.rng.random() < 0.6:  # mostly in the order of the record
        names = [name for name in record["fields"] if name in names]
    values = {}
    for name in names:
        key = scene.rng.choice(name.split("/"))
        values[key] = _value(scene, record["fields"][name])
    keys = list(values)
    scene.slots |= {"said": sentence, "keys": ", ".join(keys[:-1]) + " and " + keys[-1], "comma": ", ".join(keys)}
    scene.slots["quoted"] = ", ".join(f'"{key}"' for key in keys)
    dialogue.ask(scene.expand(scene.pick(phrases["extract"])), json.dumps(values, ensure_ascii=False))


def _value(scene: Scene, template: str) -> Any:
    """Return a JSON value: "int [age]" is a number, "list [a]; [b]" a list, and anything else a text."""
    kind, _, rest = template.partition(" ")
    if kind == "int":
        return int(scene.expand(rest))
    if kind == "list":
        return scene.expand(rest).split("; ")
    return scene.expand(template)


def tool_use(scene: Scene, dialogue: Dialogue) -> None:
    """Call one of several tools and answer with its result, or answer without a tool."""
    offered = scene.rng.sample(phrases["tools"], scene.rng.randint(1, 3))
    dialogue.tools += [
        {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
        for tool in offered
    ]
    if scene.rng.random() < 0.12:
        _exchange(scene, scene.pick(phrases["hello"]), dialogue)
        return
    tool = offered[0]
    scene.rng.shuffle(dialogue.tools)
    scene.words = {**scene.words, "words": tool.get("words", {})}
    scene.meet("h", "name")
    if tool["name"] == "calculator":
        kind = scene.rng.choice(("plus", "minus", "times"))
        a, b = scene.rng.randint(11, 400), scene.rng.randint(3, 99)
        scene.slots |= {"a": str(a), "b": str(b), "op": {"plus": "+", "minus": "-", "times": "*"}[kind]}
        scene.slots |= {"opword": kind, "c": str({"plus": a + b, "minus": a - b, "times": a * b}[kind])}
    question = scene.expand(scene.pick(tool["asks"]))
    arguments = {key: _value(scene, template) for key, template in tool["arguments"].items()}
    call = {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}
    dialogue.messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": scene.expand(scene.pick(tool["gives"]))},
        {"role": "assistant", "content": scene.expand(scene.pick(tool["says"]))},
    ]


KINDS: dict[str, tuple[Callable[[Scene, Dialogue], None], int]] = {  # with how often each is written
    "small talk": (small_talk, 10),
    "arithmetic": (arithmetic, 24),
    "word problem": (word_problem, 8),
    "compare": (compare, 22),
    "fact": (fact, 9),
    "list": (listing, 5),
    "tale": (tale, 9),
    "writing": (writing, 6),
    "advice": (advice, 7),
    "unknown": (unknown, 4),
    "remember": (remember, 4),
    "reading": (reading, 16),
    "extraction": (extraction, 22),
    "tool": (tool_use, 10),
}


def write_dialogue(number: int, seed: int = 0, kind: str | None = None) -> Dialogue:
    """Write the dialogue of this number."""
    rng = random.Random(f"dialogue {seed} {number}")
    kind = kind or rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    dialogue = Dialogue()
    scene = Scene(rng, words=rng.choice(everyday.phrases["scenes"]))
    scene.meet("h", "me")
    scene.meet("f", "name")
    KINDS[kind][0](scene, dialogue)
    return dialogue


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3, help="dialogues to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), help="default: all kinds")
    args = parser.parse_args()
    print("\n\n* * *\n\n".join(as_text(write_dialogue(number, args.seed, args.kind)) for number in range(args.count)))
