"""Write short dialogues by rule: questions with right answers, requests, tool calls, JSON from a sentence.

    python examples/text_corpus/dialogues.py --count 3 --seed 7 --kind reading

A dialogue is a list of messages, as chat templates take them, and perhaps tools. `as_text` renders one in the format of
`chat_template.jinja`. The phrases are in the files `dialogue_*.toml`, with the marks of `everyday.py`.
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
from stories import write_story

phrases: dict[str, Any] = {"records": []}
for _name in ("records", "talks", "questions", "phrases"):
    _found = tomllib.loads(Path(__file__).with_name(f"dialogue_{_name}.toml").read_text("utf-8"))
    phrases |= _found | {"records": phrases["records"] + _found.get("records", [])}
Message = dict[str, Any]
OTHER_VALUES = 0.4  # probability that a name, number or code of a record is none of its list; half of it for nouns
CLOSED = {"weekday", "month", "colour", "hobby", "chore", "sky", "state", "spot", "by", "direction", "money"}
_SLOT = re.compile(r"\[([a-z]\w*)", re.IGNORECASE)


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
    dialogue.ask(_type(scene.rng, texts[0]), texts[1])


def _type(rng: random.Random, text: str) -> str:
    """Return the question as somebody types it, perhaps without a capital or a full stop."""
    text = text[0].lower() + text[1:] if rng.random() < 0.08 else text
    return text.rstrip(".?!") if rng.random() < 0.1 else text


def small_talk(scene: Scene, dialogue: Dialogue) -> None:
    """Greet and chat about the day."""
    if not any(m["role"] == "user" for m in dialogue.messages) and scene.rng.random() < 0.7:
        _exchange(scene, scene.pick(phrases["hello"]), dialogue)
    for _ in range(scene.rng.randint(1, 2)):
        _exchange(scene, scene.pick(phrases["chat"]), dialogue)


def arithmetic(scene: Scene, dialogue: Dialogue) -> None:
    """Ask sums, differences, products and quotients with small numbers."""
    for number in range(scene.rng.choice((1, 1, 2))):
        kind = scene.rng.choice(("plus", "plus", "minus", "minus", "times", "divided"))
        a, b, c = _numbers(scene.rng, kind)
        scene.slots |= {"a": str(a), "b": str(b), "c": str(c)}
        asked = phrases["sums_again" if number and scene.rng.random() < 0.5 else "sums"][kind]
        _exchange(scene, [asked, phrases["sum_answers"][kind]], dialogue)


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
    for _ in range(scene.rng.choice((1, 1, 2))):
        question, answer, *again = scene.pick(phrases["compare"])
        _choose_values(scene)
        _exchange(scene, [question, answer], dialogue)
        if again and scene.rng.random() < 0.3:
            _choose_values(scene)
            _exchange(scene, [again[0], answer], dialogue)


def _choose_values(scene: Scene) -> None:
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


def fact(scene: Scene, dialogue: Dialogue) -> None:
    """Ask what something is, or about one of the small facts."""
    for _ in range(scene.rng.choice((1, 1, 2, 3))):
        topic = scene.pick(everyday.phrases["facts"])
        scene.slots["topic"] = topic["name"]
        if scene.rng.random() < 0.5:
            question, answer = scene.pick(topic["ask"])
            _exchange(scene, [question, answer], dialogue)
        elif scene.rng.random() < 0.4 and " is " in topic["is"][0]:  # not a person of the past or a plural
            _exchange(scene, [phrases["what_is"], scene.expand(topic["is"][0])], dialogue)
        else:
            sentences = scene.rng.sample(topic["say"], min(2, len(topic["say"])))
            _exchange(scene, [phrases["tell_about"], " ".join((topic["is"][0], *sentences))], dialogue)


def follow_up(scene: Scene, dialogue: Dialogue) -> None:
    """Ask the same of several things: "What do cows eat?", then "And horses?"."""
    pattern, *forms = scene.pick(phrases["follow_ups"])
    asked = scene.rng.sample(_questions(pattern), scene.rng.choice((2, 2, 3)))
    for number, (thing, question, answer) in enumerate(asked):
        scene.slots["thing"] = thing
        _exchange(scene, [forms if number else question, answer], dialogue)


@cache
def _questions(pattern: str) -> list[tuple[str, str, str]]:
    """Return the thing, the question and the answer of each fact whose question has this pattern."""
    pairs = (pair for topic in everyday.phrases["facts"] for pair in topic["ask"])
    return [(found[1], question, answer) for question, answer in pairs if (found := re.search(pattern, question))]


def listing(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a few things of one kind."""
    kind, members = scene.pick(list(phrases["lists"].items()))
    count = scene.rng.randint(2, 5)
    chosen = scene.rng.sample(members.split(", "), count)
    number = ("two", "three", "four", "five")[count - 2]
    scene.slots |= {"kind": kind, "count": number, "items": ", ".join(chosen[:-1]) + " and " + chosen[-1]}
    scene.slots |= {"item": chosen[0], "lines": _lines(chosen)}
    _exchange(scene, scene.pick(phrases["list_requests"]), dialogue)


def _lines(names: list[str]) -> str:
    return "\n".join(f"{at}. {name[0].upper()}{name[1:]}" for at, name in enumerate(names, start=1))


def tale(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a short story about an animal, a person or a thing."""
    looks, kinds, *pronouns = scene.pick(phrases["heroes"]).split("; ")
    kind = scene.rng.choice(kinds.split(", "))
    who = f"a {scene.rng.choice(looks.split(', '))} {kind}"
    if scene.rng.random() < 0.2:
        names = everyday.phrases["people"]["name"]["f" if pronouns[0] == "she" else "m"].split(", ")
        who += f" called {_invent_name(scene.rng) if scene.rng.random() < OTHER_VALUES else scene.rng.choice(names)}"
    scene.slots |= {"who": scene.expand(who), "hero": ["", kind, *pronouns]}
    dialogue.ask(*(scene.expand(scene.pick(phrases[part])) for part in ("tale_requests", "tales")))


def writing(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a text of the everyday kinds: a recipe, a letter, a forecast, facts."""
    kind = scene.pick(list(phrases["write"]))
    text = everyday.Scene(scene.rng)
    everyday.KINDS[kind][0](text)
    named = {name: text.slots.get(name) for name in ("meal", "to", "about")}
    scene.slots |= {name: text.expand(value) for name, value in named.items() if isinstance(value, str)}
    dialogue.ask(scene.expand(scene.pick(phrases["write"][kind])), "\n\n".join(text.text))


def going_on(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for the rest of a text."""
    text, ends = "", list[int]()
    while len(ends) < 3:
        source = everyday.Scene(scene.rng)
        everyday.telling(source, everyday.LONG)
        text = " ".join(source.text) if scene.rng.random() < 0.7 else write_story(scene.rng.getrandbits(40), seed=-1)
        ends = [match.end() for match in re.finditer(r"(?<!Mr)(?<!Mrs)[.!?]\"?(?=\s+[\"A-Z])", text)]
        ends = [end for end in ends if text[:end].count('"') % 2 == 0]  # not inside of what somebody says
    at = scene.rng.randint(1, 2)
    scene.slots["begin"] = text[: ends[at - 1]]
    rest = text[ends[at - 1] : ends[min(at + 4, len(ends) - 1)]].strip()
    dialogue.ask(scene.expand(scene.pick(phrases["go_on"])), rest)


def advice(scene: Scene, dialogue: Dialogue) -> None:
    """Ask what to do; the answers are things that people do in this scene."""
    for _ in range(scene.rng.choice((1, 1, 2))):
        _exchange(scene, scene.pick(phrases["advice"]), dialogue)


def talk(scene: Scene, dialogue: Dialogue) -> None:
    """Ask one of many other questions and requests, each with its own answers."""
    for _ in range(scene.rng.choice((1, 1, 2))):
        _exchange(scene, scene.pick(phrases["talks"]), dialogue)


def question(scene: Scene, dialogue: Dialogue) -> None:
    """Ask about facts and reasons of everyday life."""
    for _ in range(scene.rng.choice((1, 1, 2, 3))):
        _exchange(scene, scene.pick(phrases["questions"]), dialogue)


def unknown(scene: Scene, dialogue: Dialogue) -> None:
    """Ask what a small model cannot know or do."""
    _exchange(scene, scene.pick(phrases["unknown"]), dialogue)


def remember(scene: Scene, dialogue: Dialogue) -> None:
    """Tell the model one or two things and ask for them later."""
    _meet_people(scene)
    things = scene.rng.sample(phrases["remember"], scene.rng.choice((1, 1, 2)))
    for first, _ in things:
        _exchange(scene, first, dialogue)
    for _ in range(scene.rng.choice((0, 1, 1, 2))):
        scene.rng.choice((arithmetic, compare, fact, listing))(scene, dialogue)
    for _, second in scene.rng.sample(things, len(things)):
        _exchange(scene, second, dialogue)


def _meet_people(scene: Scene) -> None:
    """Introduce two people, some of them with names that are in no list."""
    for slot in "hf":
        person = scene.meet(slot, "name")
        if scene.rng.random() < OTHER_VALUES:
            person.name = _invent_name(scene.rng)


def _record(scene: Scene, record: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Return a record and a template of a sentence that contains all its values."""
    record = record or scene.pick(phrases["records"])
    _use_words(scene, record, record["fields"])
    return record, scene.pick(record["say"])


def _use_words(scene: Scene, record: dict[str, Any], values: dict[str, str]) -> None:
    """Let the scene choose values from the words of a record or tool, and for some of them values of no list.

    From short lists a model learns the values by heart, and answers with one of them instead of copying a new one. A
    list of several draws, such as [goals] and [goals2], stays, because the draws must differ.
    """
    words = record.get("words", {})
    scene.slots.clear()
    scene.words = {"words": dict(words)}
    _meet_people(scene)
    text = json.dumps(record).lower()
    for name in sorted(set(re.findall(r"\[(\w+)\]", " ".join(values.values()))) - CLOSED):
        of = words.get(name) or everyday.phrases["words"].get(name)
        if not isinstance(of, str) or "[" in of or ";" in of or re.search(rf"\[{name}[.\d]", text):
            continue
        listed = of.split(", ")
        value = scene.expand(scene.rng.choice(listed))
        if scene.rng.random() < (OTHER_VALUES / 2 if re.search(r"^[a-z ]+$", value) else OTHER_VALUES):
            scene.words["words"][name] = _other_value(scene.rng, value, listed)


def _other_value(rng: random.Random, value: str, listed: list[str]) -> str:
    """Return a value of the same form: another time, number, address or code, or a name or noun in no list."""
    if re.fullmatch(r"\d+:\d\d", value):
        hour, minute = rng.randint(1, 12), rng.randint(0, 59)
        half = rng.choice(("am", "pm"))
        return rng.choice((f"{hour + 11}:{minute:02}", f"{hour}:{minute:02} {half}", f"{hour} {half}"))
    if re.fullmatch(r"-?\d+", value):
        return str(rng.randint(min(map(int, listed)), max(map(int, listed))))
    if re.match(r"\d+ [A-Z][a-z]", value):  # a date
        year = f" {rng.randint(1930, 2024)}" if value[-1].isdigit() else ""
        return f"{rng.randint(1, 28)} {rng.choice(everyday.phrases['words']['month'].split(', '))}{year}"
    if "@" in value:
        return re.sub(r"\w+(?=[.@])", lambda word: _invent_name(rng).lower(), value)
    if re.search(r"\d", value):
        value = re.sub(r"\d", lambda digit: str(rng.randint(1, 9)), value)
        return re.sub(r"[A-Z](?![a-z])", lambda letter: rng.choice("ABCDEFGHKLMNPRSTVWXZ"), value)
    before, _, last = value.rpartition(" ")
    if last in ("Street", "Road", "Lane", "Avenue"):
        return f"{_invent_name(rng)} {last}"
    name = _invent_name(rng) if last[0].isupper() else _invent_name(rng).lower() + "s" * last.endswith("s")
    return f"{'a' if before == 'an' else before} {name}".strip()


@cache
def _nouns() -> list[str]:
    """Return words that may stand after "a" or "the", from the lists."""
    lists = (of for name, of in phrases["lists"].items() if name not in ("adjectives", "verbs"))
    members = (member for of in lists for member in of.split(", "))
    return sorted({noun for member in members if re.fullmatch(r"[b-df-hj-np-tv-z][a-z]+", noun := member.split()[-1])})


def _invent_name(rng: random.Random) -> str:
    """Return a name of one to three syllables that is in no list."""
    starts, vowels, ends = (parts.split(", ") for parts in phrases["name_parts"])
    syllables = (rng.choice(starts) + rng.choice(vowels) for _ in range(rng.choice((1, 2, 2, 3))))
    return ("".join(syllables) + rng.choice(ends)).capitalize()


def reading(scene: Scene, dialogue: Dialogue) -> None:
    """Ask about a given paragraph; the answer is in it. Some paragraphs have two sentences of the same kind."""
    rng = scene.rng
    record, template = _record(scene)
    sentences = [scene.expand(template)]
    asked = [(scene.expand(question), answer) for question, answer in record["ask"]]
    if rng.random() < 0.4:
        rival = Scene(rng)
        second = rival.expand(_record(rival, record)[1])
        marks = {scene.expand(f"[{name}.name]" if name in "hf" else f"[{name}]") for name in _slots(template)}
        # Only one of the two sentences has what the question names.
        clear = [pair for pair in asked if any(mark in pair[0] and mark not in second for mark in marks)]
        if clear:
            sentences, asked = rng.sample([*sentences, second], 2), clear
    for _ in range(rng.randint(1, 3)):
        sentences.insert(rng.randint(0, len(sentences)), scene.expand(scene.pick(phrases["fillers"])))
    scene.slots["paragraph"] = " ".join(sentences)
    other = Scene(rng)
    missing = [question for question, _ in _record(other)[0]["ask"] if "[h.name]" in question]
    if missing and rng.random() < 0.08:
        asked = [(other.expand(missing[0]), rng.choice(phrases["not_in_text"]))]
    for number, (question, answer) in enumerate(rng.sample(asked, min(len(asked), rng.choice((1, 1, 2))))):
        scene.slots["question"] = question
        question = scene.pick(phrases["about_paragraph"]) if number == 0 else "[question]"
        dialogue.ask(scene.expand(question), scene.expand(answer))


def _slots(template: str) -> set[str]:
    return {name.lower() for name in _SLOT.findall(template)}


def rewriting(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for a sentence in other words, or for the sentence that matters in a paragraph."""
    others: list[str] = []
    while not others:
        record, template = _record(scene)
        others = [other for other in record["say"] if other != template and _slots(other) <= _slots(template)]
    sentences = [scene.expand(template)]
    is_summary = scene.rng.random() < 0.5
    for _ in range(scene.rng.randint(2, 4) if is_summary else 0):
        sentences.insert(scene.rng.randint(0, len(sentences)), scene.expand(scene.pick(phrases["fillers"])))
    scene.slots["said"] = " ".join(sentences)
    request = scene.expand(scene.pick(phrases["summarise" if is_summary else "rewrite"]))
    dialogue.ask(request, scene.expand(scene.pick(others)))


def instruction(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for something to be done with given words: sort, count, repeat, write as a list."""
    rng = scene.rng
    _meet_people(scene)
    items = rng.sample(_nouns(), rng.randint(3, 5))
    if rng.random() < OTHER_VALUES:
        items[rng.randrange(len(items))] = _invent_name(rng).lower()
    new, rest = rng.choice(_nouns()), items[1:]
    words = rng.sample(items, len(items))
    scene.slots |= {"items": ", ".join(words), "item": items[0], "without": ", ".join(w for w in words if w in rest)}
    scene.slots |= {"abc": ", ".join(sorted(items)), "joined": f"{', '.join(words[:-1])} and {words[-1]}"}
    scene.slots |= {"count": str(len(items)), "first": words[0], "last": words[-1], "more": new}
    scene.slots |= {"upper": items[0].upper(), "back": ", ".join(words[::-1])}
    scene.slots |= {"lines": _lines(words), "dashes": "\n".join(f"- {word}" for word in words)}
    scene.slots["sentence"] = scene.expand(scene.pick(phrases["fillers"]))
    dialogue.ask(*(scene.expand(scene.pick(part)) for part in scene.pick(phrases["instructions"])))


def extraction(scene: Scene, dialogue: Dialogue) -> None:
    """Ask for values of a sentence as JSON."""
    record, template = _record(scene)
    sentence = scene.expand(template)
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
    types = {int: "integer", float: "number", list: "array", str: "string"}
    scene.slots["schema"] = json.dumps({key: types[type(value)] for key, value in values.items()})
    scene.slots["empty"] = json.dumps(dict.fromkeys(keys))
    scene.slots |= {"said": sentence, "keys": ", ".join(keys[:-1]) + " and " + keys[-1], "comma": ", ".join(keys)}
    scene.slots["quoted"] = ", ".join(f'"{key}"' for key in keys)
    dialogue.ask(scene.expand(scene.pick(phrases["extract"])), json.dumps(values, ensure_ascii=False))


def _value(scene: Scene, template: str) -> Any:
    """Return a JSON value: "int [age]" and "float [price]" are numbers, "list [a]; [b]" a list, others texts."""
    kind, _, rest = template.partition(" ")
    if kind in ("int", "float"):
        return {"int": int, "float": float}[kind](scene.expand(rest))
    if kind == "list":
        return scene.expand(rest).split("; ")
    return scene.expand(template)


def tool_use(scene: Scene, dialogue: Dialogue) -> None:
    """Call one or two of several tools and answer with the results, or answer without a tool."""
    rng = scene.rng
    offered = [(tool, _declaration(rng, tool)) for tool in rng.sample(phrases["tools"], rng.randint(1, 4))]
    dialogue.tools += rng.sample([declared for _, declared in offered], len(offered))
    if rng.random() < 0.15:
        rng.choice((small_talk, fact, unknown))(scene, dialogue)
        return
    for tool, declared in offered[: rng.choice((1, 1, 1, 2))]:
        _use_words(scene, tool, tool["arguments"])
        kind = rng.choice(("plus", "minus", "times"))
        a, b = rng.randint(11, 400), rng.randint(3, 99)
        scene.slots |= {"a": str(a), "b": str(b), "op": {"plus": "+", "minus": "-", "times": "*"}[kind]}
        scene.slots |= {"opword": kind, "c": str({"plus": a + b, "minus": a - b, "times": a * b}[kind])}
        question = scene.expand(scene.pick(tool["asks"]))
        values = [_value(scene, template) for template in tool["arguments"].values()]
        result = {rng.choice(key.split("/")): _value(scene, of) for key, of in tool.get("result", {}).items()}
        use_json = bool(result) and rng.random() < 0.5
        function = declared["function"]
        call = {
            "name": function["name"],
            "arguments": dict(zip(function["parameters"]["required"], values, strict=True)),
        }
        dialogue.messages += [
            {"role": "user", "content": _type(rng, question)},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": json.dumps(result) if use_json else scene.expand(scene.pick(tool["gives"]))},
            {"role": "assistant", "content": scene.expand(scene.pick(tool["says"]))},
        ]


def _declaration(rng: random.Random, tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as clients declare it, with one of its names and one name of each argument."""
    keys = [rng.choice(names.split("/")) for names in tool["arguments"]]
    types = ("integer" if template.startswith("int ") else "string" for template in tool["arguments"].values())
    properties = {key: {"type": kind} for key, kind in zip(keys, types, strict=True)}
    function = {"name": rng.choice(tool["name"].split("/")), "description": rng.choice(tool["description"])}
    return {
        "type": "function",
        "function": {**function, "parameters": {"type": "object", "properties": properties, "required": keys}},
    }


KINDS: dict[str, tuple[Callable[[Scene, Dialogue], None], int]] = {  # with how often each is written
    "small talk": (small_talk, 13),
    "arithmetic": (arithmetic, 14),
    "word problem": (word_problem, 7),
    "compare": (compare, 14),
    "fact": (fact, 14),
    "follow-up": (follow_up, 5),
    "list": (listing, 6),
    "tale": (tale, 9),
    "writing": (writing, 6),
    "going on": (going_on, 5),
    "advice": (advice, 11),
    "talk": (talk, 30),
    "question": (question, 34),
    "unknown": (unknown, 4),
    "remember": (remember, 8),
    "reading": (reading, 26),
    "rewriting": (rewriting, 7),
    "instruction": (instruction, 7),
    "extraction": (extraction, 44),
    "tool": (tool_use, 14),
}


def write_dialogue(number: int, seed: int = 0, kind: str | None = None) -> Dialogue:
    """Write the dialogue of this number. Without a kind, it may have two of them, a greeting and a goodbye."""
    rng = random.Random(f"dialogue {seed} {number}")
    dialogue = Dialogue()

    def write(part: Callable[[Scene, Dialogue], None]) -> None:
        scene = Scene(rng)
        scene.meet("h", "me")
        scene.meet("f", "name")
        part(scene, dialogue)

    if kind:
        write(KINDS[kind][0])
        return dialogue
    if rng.random() < 0.1:
        dialogue.messages.append({"role": "system", "content": rng.choice(phrases["system"])})
    if rng.random() < 0.06:
        write(lambda scene, dialogue: _exchange(scene, scene.pick(phrases["hello"]), dialogue))
    for chosen in rng.choices(list(KINDS), [weight for _, weight in KINDS.values()], k=rng.choice((1, 1, 1, 2))):
        write(KINDS[chosen][0])
    if rng.random() < 0.05 and len(dialogue.messages[-1]["content"]) < 200:
        dialogue.ask(_type(rng, rng.choice(phrases["again"])), dialogue.messages[-1]["content"])
    if rng.random() < 0.1:
        write(lambda scene, dialogue: _exchange(scene, scene.pick(phrases["goodbye"]), dialogue))
    return dialogue


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3, help="dialogues to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), help="default: all kinds")
    args = parser.parse_args()
    print("\n\n* * *\n\n".join(as_text(write_dialogue(number, args.seed, args.kind)) for number in range(args.count)))
