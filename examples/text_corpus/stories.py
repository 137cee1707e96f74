"""Write short stories by rule: simple, regular prose that a small model can master, and too varied to learn by heart.

    python examples/text_corpus/stories.py --count 3 --seed 7

A story has a hero, a wish or a trouble, helpers and obstacles, and an end that follows from them. A gift from the
beginning is used near the end. The number and the seed of a story decide all of it.

The phrases are in `story_phrases.py`. `{one|two}` is a choice. `[h]` is the hero's name or description. `[h.a]` and
`[h.new]` introduce the hero; `[h.his]` refers back. `[gift]` is a thing. A capital, `[H]`, begins a sentence.
"""

import argparse
import random
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import story_phrases as phrases

_PRONOUNS = {
    "m": {"he": "he", "him": "him", "his": "his", "himself": "himself", "boy": "boy", "son": "son"},
    "f": {"he": "she", "him": "her", "his": "her", "himself": "herself", "boy": "girl", "son": "daughter"},
}
_PART = re.compile(r"[{|}]|\[[^\]]+\]|[^{|}\[]+")
_A = re.compile(r"\b([Aa]) (?=[aeiou](?!ni(?:c|t)|se|ne\b))")  # but: a unicorn, a unit, a useful thing, a one


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
        if attribute == "a":
            return f"a {self.look} {self.kind}"
        if attribute == "new":
            return self.name if self.has_name else f"a {self.kind}"
        if attribute == "name" or not self.has_name:
            return self.name
        return self.name if rng.random() < 0.75 else f"the {self.kind}"


@dataclass
class Story:
    """A story in progress: its characters and things, and the paragraphs so far."""

    rng: random.Random
    slots: dict[str, Any] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def pick(self, choices: Any) -> Any:
        """Return one of the choices that this story has not used."""
        choices = list(choices)
        fresh = [choice for choice in choices if str(choice) not in self.used] or choices
        chosen = self.rng.choice(fresh)
        self.used.add(str(chosen))
        return chosen

    def cast(self, slot: str, kinds: str) -> Character:
        """Fill a slot with a new character of one of these kinds, separated by spaces: "animal child"."""
        group = self.rng.choice(kinds.split())
        kind, gender, looks = self.pick(phrases.KINDS[group])
        gender = self.rng.choice("mf") if gender == "mf" else gender
        if group in ("guest", "rival"):
            name = f"the {kind}"
        else:
            name = self.pick(phrases.NAMES[gender].split())
            if group == "grown":
                name = self.rng.choice(phrases.TITLES[gender]).format(name)
        look = self.rng.choice(looks.split(", "))
        named = group not in ("guest", "rival")
        self.slots[slot] = Character(name, kind, look, gender, is_animal=group in ("animal", "rival"), has_name=named)
        return self.slots[slot]

    def set(self, **choices: Any) -> None:
        """Give each slot one of its choices."""
        for slot, of in choices.items():
            self.slots[slot] = self.pick(of)

    def tell(self, template: str) -> None:
        """Expand a template and add it to the story; each line is a paragraph."""
        for line in template.strip().split("\n"):
            if written := self.expand(line.strip()):
                self.text.append(written)

    def expand(self, template: str) -> str:
        """Return the template with its choices made and its slots filled."""
        text = " ".join("".join(self._write(_parse(template))).split())
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
        value = self.slots[name.lower()]
        if isinstance(value, Character):
            text = value.says(attribute, self.rng)
        elif isinstance(value, str):
            text = self.expand(value)
        else:
            text = self.expand(value[int(attribute or 0)])
        return text[0].upper() + text[1:] if name[0].isupper() else text


@cache
def _parse(template: str) -> tuple[Any, ...]:
    """Parse a template into strings and slots; a choice becomes a list of such tuples."""
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
    story.set(day=phrases.DAYS, sky=phrases.SKIES, food=phrases.FOODS, treat=phrases.FOODS, tree=phrases.TREES)
    story.set(colour=phrases.COLOURS, flower=phrases.FLOWERS, trait=phrases.TRAITS, sound=phrases.SOUNDS)
    if story.rng.random() < 0.5:
        _quest(story)
    else:
        _tale(story)
    return "\n\n".join(story.text)


def _quest(story: Story) -> None:
    """Tell of a hero who sets out, helps, is given something, needs it on the way, and comes home."""
    hero = story.cast("h", "animal animal child child grown")
    story.set(home=phrases.HOMES["animal" if hero.is_animal else "person"])
    story.set(love=phrases.LOVES)
    story.tell(story.pick(phrases.OPENINGS))
    trouble = story.pick(phrases.QUESTS)
    _prepare(story, trouble)
    _tell_parts(story, trouble, ("start",))
    story.slots["gift"], use = story.pick(phrases.GIFTS)
    for _ in range(story.rng.choice((0, 0, 1))):
        story.set(place=phrases.PLACES)
        story.tell(story.pick(phrases.ON_THE_WAY))
    story.set(place=phrases.PLACES)
    story.cast("g", "guest rival" if story.rng.random() < 0.7 else "guest")
    story.tell(story.pick(phrases.MEETINGS) + " " + story.pick(phrases.TROUBLES))
    story.tell(story.pick(phrases.THANKS))
    if story.rng.random() < 0.4:
        story.set(place=phrases.PLACES)
        story.tell(story.pick(phrases.ON_THE_WAY))
    story.tell(use)
    _tell_parts(story, trouble, ("end",))
    story.tell(story.pick(phrases.ENDINGS))


def _tale(story: Story) -> None:
    """Tell of one event at one place."""
    tale = story.pick(phrases.TALES)
    hero = story.cast("h", tale.get("hero", "animal animal child"))
    story.set(home=phrases.HOMES["animal" if hero.is_animal else "person"], place=phrases.PLACES, love=phrases.LOVES)
    _prepare(story, tale)
    if story.rng.random() < tale.get("opening", 0.6):
        story.tell(story.pick(phrases.OPENINGS))
        _tell_parts(story, tale, ("next", "end"))
    else:
        _tell_parts(story, tale, ("start", "end"))
    if story.rng.random() < 0.75:
        story.tell(story.pick(tale.get("morals", phrases.ENDINGS)))


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
