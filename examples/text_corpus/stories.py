"""Write short stories by rule: simple, regular prose that a small model can master, and too varied to learn by heart.

    python examples/text_corpus/stories.py --count 3 --seed 7

A story has a hero, a wish or a trouble, helpers and obstacles, and an end that follows from them. A gift from the
beginning is used near the end. Other texts are sketches: a letter, a diary, a place, an animal, a recipe. The number
and the seed of a text decide all of it.

The phrases are in `story_phrases.toml`. `{one|two}` is a choice. `[h]` is the hero's name or
description. `[h.a]` and `[h.new]` introduce the hero; `[h.his]` refers back. `[gift]` is the object that the hero gets.
`[thing]` is a word of the lexicon and stays the same throughout a text; `[thing2]` is another one. A capital, `[H]`,
begins a sentence.
"""

import argparse
import random
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

phrases = SimpleNamespace(**tomllib.loads(Path(__file__).with_name("story_phrases.toml").read_text("utf-8")))
_PRONOUNS = {
    "m": {
        "he": "he",
        "him": "him",
        "his": "his",
        "himself": "himself",
        "boy": "boy",
        "brother": "brother",
        "man": "man",
    },
    "f": {
        "he": "she",
        "him": "her",
        "his": "her",
        "himself": "herself",
        "boy": "girl",
        "brother": "sister",
        "man": "woman",
    },
}
_PART = re.compile(r"[{|}]|\[[^\]]+\]|[^{|}\[]+")
_A = re.compile(r"\b([Aa]) (?=[aeiou](?!ni[cftv]|s[eu]|ne\b)|hour|honest)")  # but: a unicorn, a useful thing
_TAG = re.compile(r'(?<=" )(said|asked) (the [a-z]+|my [a-z]+|he|she|[A-Z][a-z]+)\.')
_MANNERS = {
    "said": ("quietly", "slowly", "softly", "at last", "after a moment", "with a smile", "with a nod", "calmly"),
    "asked": ("quietly", "softly", "at last", "after a while", "with a smile", "in a low voice"),
}
_GROUPS_WITHOUT_NAMES = ("guest", "rival", "kin")


@dataclass
class Character:
    """Somebody in a story, with properties that stay the same in all of it."""

    name: str  # Pip; of somebody without a name: the old woman
    kind: str  # mouse
    look: str  # small brown
    gender: str
    is_animal: bool
    has_name: bool

    def says(self, attribute: str, rng: random.Random) -> str:
        """Return the text of `[h.attribute]`; without an attribute, a name or a description."""
        if attribute in _PRONOUNS["m"]:
            return _PRONOUNS[self.gender][attribute]
        if attribute == "kind":
            return self.kind
        if attribute == "a":
            return f"a {self.look} {self.kind}"
        if attribute == "new":
            return self.name if self.has_name else f"a {self.kind}"
        if attribute == "name" or not self.has_name:
            return self.name
        return self.name if rng.random() < 0.75 else f"the {self.kind}"


def _key(choice: Any) -> Any:
    """Return what tells a choice from others: a table of phrases, which may be long, by its identity."""
    return id(choice) if isinstance(choice, dict | list) else choice


@dataclass
class Story:
    """A story in progress: its characters and things, and the paragraphs so far."""

    rng: random.Random
    slots: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    used: dict[Any, Any] = field(default_factory=dict)  # choices by key; a choice that is kept keeps its identity

    def pick(self, choices: Any) -> Any:
        """Return one of the choices that this story has not used."""
        choices = list(choices)
        chosen = self.rng.choice([choice for choice in choices if _key(choice) not in self.used] or choices)
        self.used[_key(chosen)] = chosen
        return chosen

    def cast(self, slot: str, kinds: str) -> Character:
        """Fill a slot with a new character of one of these kinds, separated by spaces: "animal child".

        "=h" asks for another one like the character in slot h.
        """
        if kinds.startswith("="):
            like = self.slots[kinds[1:]]
            group, (kind, gender, looks) = "child", (like.kind, like.gender, like.look)
        else:
            group = self.rng.choice(kinds.split())
            kind, gender, looks = self.pick(phrases.kinds[group])
        gender = self.rng.choice("mf") if gender == "mf" else gender
        if group in _GROUPS_WITHOUT_NAMES:
            name = f"{'my' if group == 'kin' else 'the'} {kind}"
        else:
            name = self.pick(phrases.names[gender].split())
            if group in phrases.titles:
                name = self.rng.choice(phrases.titles[group][gender]).format(name)
        look = self.rng.choice(looks.split(", "))
        named = group not in _GROUPS_WITHOUT_NAMES
        self.slots[slot] = Character(name, kind, look, gender, is_animal=group in ("animal", "rival"), has_name=named)
        return self.slots[slot]

    def set(self, **choices: Any) -> None:
        """Give each slot one of its choices."""
        for slot, of in choices.items():
            self.slots[slot] = self.pick(of)

    def tell(self, template: str) -> None:
        """Expand a template and add it to the story; each line is a paragraph."""
        self.text += [line for line in self.expand(template).split("\n") if line]

    def expand(self, template: str) -> str:
        """Return the template with its choices made and its slots filled."""
        text = re.sub(r" +", " ", "".join(self._write(_parse(template)))).replace("\n ", "\n").strip()
        return _A.sub(r"\1n ", text)

    def _write(self, parts: tuple[Any, ...]) -> list[str]:
        written = []
        for part in parts:
            if isinstance(part, str):
                written.append(self._fill(part[1:-1]) if part.startswith("[") else part)
            else:
                written += self._write(self.rng.choice(part))
        return written

    def _fill(self, slot: str) -> str:
        name, _, attribute = slot.partition(".")
        value = self.slots.get(name.lower()) or self._look_up(name.lower())
        if isinstance(value, Character):
            text = value.says(attribute, self.rng)
        elif isinstance(value, str):
            text = self.expand(value)
        else:
            text = self.expand(value[int(attribute or 0)])
        return text[0].upper() + text[1:] if name[0].isupper() else text

    def _look_up(self, name: str) -> Any:
        entry = self.expand(self.pick(phrases.lexicon[name.rstrip("0123456789")]))
        self.slots[name] = entry.split("; ") if "; " in entry else entry
        return self.slots[name]


@cache
def _parse(template: str) -> tuple[Any, ...]:
    """Parse a template into a tuple of strings and slots. A choice between templates becomes a list of tuples."""
    tokens = _PART.findall(template)
    parts, at = _sequence(tokens, 0)
    if at != len(tokens):
        raise ValueError(f"a template must close what it opens: {template!r}")
    return parts


def _sequence(tokens: list[str], at: int) -> tuple[tuple[Any, ...], int]:
    parts: list[Any] = []
    while at < len(tokens) and tokens[at] not in ("|", "}"):
        if tokens[at] != "{":
            parts.append(tokens[at])
            at += 1
            continue
        choices = []
        while tokens[at] != "}":
            choice, at = _sequence(tokens, at + 1)
            if at == len(tokens):
                raise ValueError(f"a template must close what it opens: {''.join(tokens)!r}")
            choices.append(choice)
        parts.append(choices)
        at += 1
    return tuple(parts), at


def write_story(number: int, seed: int = 0) -> str:
    """Return the story with this number: paragraphs, with an empty line between them.

    Example: `write_story(3)`.
    """
    story = Story(random.Random(f"{seed} {number}"))
    story.rng.choices((_quest, _tale, _sketch), weights=(0.35, 0.25, 0.4))[0](story)
    return "\n\n".join(_TAG.sub(lambda tag: _add_manner(tag, story.rng), paragraph) for paragraph in story.text)


def _add_manner(tag: re.Match[str], rng: random.Random) -> str:
    """Return `said Anna quietly.` for some of the sentences that end in `said Anna.`"""
    verb, who = tag.groups()
    return f"{verb} {who} {rng.choice(_MANNERS[verb])}." if rng.random() < 0.15 else tag[0]


def _choose_words(story: Story) -> None:
    story.set(day=phrases.days, sky=phrases.skies, food=phrases.foods, treat=phrases.foods, tree=phrases.trees)
    story.set(colour=phrases.colours, flower=phrases.flowers, trait=phrases.traits, sound=phrases.sounds)


def _quest(story: Story) -> None:
    """Tell of a hero who sets out, helps, is given something, needs it on the way, and comes home."""
    _choose_words(story)
    hero = story.cast("h", "animal animal child child grown")
    story.set(home=phrases.homes["animal" if hero.is_animal else "person"])
    story.set(love=phrases.loves)
    story.tell(story.pick(phrases.openings))
    trouble = story.pick(phrases.quests)
    _prepare(story, trouble)
    _tell_parts(story, trouble, ("start",))
    story.slots["gift"], use = story.pick(phrases.gifts)
    for _ in range(story.rng.choice((0, 0, 1))):
        story.set(place=phrases.places)
        story.tell(story.pick(phrases.on_the_way))
    story.set(place=phrases.places)
    story.cast("g", "guest rival" if story.rng.random() < 0.7 else "guest")
    story.tell(story.pick(phrases.meetings) + " " + story.pick(phrases.troubles))
    story.tell(story.pick(phrases.thanks))
    if story.rng.random() < 0.4:
        story.set(place=phrases.places)
        story.tell(story.pick(phrases.on_the_way))
    story.tell(use)
    _tell_parts(story, trouble, ("end",))
    story.tell(story.pick(phrases.endings))


def _tale(story: Story) -> None:
    """Tell of one event at one place."""
    _choose_words(story)
    tale = story.pick(phrases.tales)
    hero = story.cast("h", tale.get("hero", "animal animal child"))
    story.set(home=phrases.homes["animal" if hero.is_animal else "person"], place=phrases.places, love=phrases.loves)
    _prepare(story, tale)
    if story.rng.random() < tale.get("opening", 0.6):
        story.tell(story.pick(phrases.openings))
        _tell_parts(story, tale, ("next", "end"))
    else:
        _tell_parts(story, tale, ("start", "end"))
    if story.rng.random() < 0.75:
        story.tell(story.pick(tale.get("morals", phrases.endings)))


def _sketch(story: Story) -> None:
    """Write a short text of another kind."""
    sketch = story.pick(phrases.sketches)
    story.set(day=phrases.days, where=phrases.homes["person"])
    _prepare(story, sketch)
    for paragraph in sketch["tell"]:
        if isinstance(paragraph, str):
            story.tell(paragraph)
            continue
        at = next(at for at, part in enumerate(paragraph) if isinstance(part, int))
        sentences = paragraph[at + 1 :]
        chosen = sorted(story.rng.sample(range(len(sentences)), paragraph[at]))
        story.tell(" ".join((*paragraph[:at], *(sentences[index] for index in chosen))))


def _prepare(story: Story, tale: dict[str, Any]) -> None:
    for slot, kinds in tale.get("cast", {}).items():
        story.cast(slot, kinds)
    story.set(**tale.get("set", {}))


def _tell_parts(story: Story, tale: dict[str, Any], parts: tuple[str, ...]) -> None:
    for part in parts:
        story.tell(tale[part] if isinstance(tale[part], str) else story.pick(tale[part]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3, help="stories to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("\n\n* * *\n\n".join(write_story(number, args.seed) for number in range(args.count)))
