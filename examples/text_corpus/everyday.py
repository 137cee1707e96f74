"""Write everyday prose by rule: whole texts, letters, recipes, directions, facts.

    python examples/text_corpus/everyday.py --count 3 --seed 7 --kind letter

The phrases are in the files `everyday_*.toml`. They use the marks of `stories.py`, and these:

- `[h]` is the hero as the subject of a sentence: a name, or a pronoun where it is clear; `[h.name]` is the name.
- `[h.was]`, `[h.has]`, `[h:want]`: a verb that agrees with the hero, who may be "I" or "we".
- `[hobby]` is something that one does: `[hobby.past]`, `[hobby.ing]` and `[hobby.third]` inflect its first word.
- `[dish.plural]` is the plural. `[dish*]` is another word each time, and none is remembered.

Most of the texts come from the files of `TOLD`, such as `everyday_at_home.toml`. Each entry there is a whole text, so
its sentences follow from each other. `hero` says who the hero may be. `words` are
chosen once per text; where one has parts, separated by semicolons, `[trouble.1]` is the second part.
"""

import argparse
import random
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from stories import Story

LONG = ("at_home", "in_town", "at_work", "in_company", "in_general", "in_memory")
TOLD = (*LONG, "in_short")
phrases: dict[str, Any] = {}
for _name in ("words", "phrases", "facts", *TOLD):
    phrases |= tomllib.loads(Path(__file__).with_name(f"everyday_{_name}.toml").read_text("utf-8"))
_NUMBERED = re.compile(r"(.*?)([0-9]*)(\*?)")
_SAID_I = re.compile(r"\b(said|asked|answered|thought) (I|we)\b(?! )")
_END = re.compile(r'([.?!]")\.')  # the sentence ends inside the quotes
_FORMS = {  # of the persons in _PERSONS
    "he": ("I", "we", "you", "he", "she"),
    "him": ("me", "us", "you", "him", "her"),
    "his": ("my", "our", "your", "his", "her"),
    "himself": ("myself", "ourselves", "yourself", "himself", "herself"),
    "was": ("was", "were", "were", "was", "was"),
    "is": ("am", "are", "are", "is", "is"),
    "has": ("have", "have", "have", "has", "has"),
    "they": ("we", "we", "you", "they", "they"),
    "them": ("us", "us", "you", "them", "them"),
    "their": ("our", "our", "your", "their", "their"),
}
_PERSONS = ("me", "we", "you", "m", "f")
_SPEAKERS = {"me": "I", "we": "we", "you": "you"}


@dataclass
class Person:
    """Somebody in a scene. `person` is one of _PERSONS."""

    name: str  # of relatives a template: "[h.his] sister"
    person: str

    def form(self, word: str) -> str:
        """Return the form of a pronoun or auxiliary verb that agrees."""
        return _FORMS[word][_PERSONS.index(self.person)]


@dataclass
class Scene(Story):
    """A text in progress, with its own words; the words of all texts complete them."""

    words: dict[str, Any] = field(default_factory=dict)
    clear: dict[str, Person] = field(default_factory=dict)  # whom "he" and "she" mean at this point
    named: list[Person] = field(default_factory=list)

    def meet(self, slot: str, groups: str) -> Person:
        """Fill a slot with a new person from one of these groups, separated by spaces: "me name kin"."""
        group = self.rng.choice(groups.split())
        if group in _SPEAKERS:
            person = Person(_SPEAKERS[group], group)
        else:
            # Another gender than the hero's, most of the time, so that pronouns are clear.
            hero = self.slots.get("h")
            other = {"m": "f", "f": "m"}.get(hero.person if isinstance(hero, Person) else "")
            gender = other if other and self.rng.random() < 0.8 else self.rng.choice("mf")
            names = phrases["people"][group][gender].split(", ")
            if other:
                names = [name for name in names if hero.name not in name]  # not "Leo and his friend Leo"
            person = Person(self.pick(names), gender)
        self.slots[slot] = person
        return person

    def tell(self, template: str) -> None:
        """Expand a template and add its paragraphs. A new paragraph names people again."""
        self.clear.clear()
        super().tell(template)

    def _fill(self, slot: str) -> str:
        name, _, verb = slot.partition(":")
        name, _, attribute = name.partition(".")
        value = self.slots.get(name.lower()) or self._look_up(name.lower())
        if isinstance(value, Person):
            text = self._mention(value, attribute, verb)
        elif isinstance(value, str):
            text = _INFLECT[attribute](value) if attribute else value
        else:
            text = self.expand(value[int(attribute or 0)])
        return text[0].upper() + text[1:] if name[0].isupper() else text

    def _mention(self, person: Person, attribute: str, verb: str) -> str:
        if verb:
            return verb if person.person in _SPEAKERS else _third(verb)
        if person.person in _SPEAKERS and attribute in ("", "name"):
            return person.name
        is_known = person in self.named or person.person in _SPEAKERS
        if attribute in _FORMS and (attribute != "he" or is_known):
            return person.form(attribute)
        self.named.append(person)
        is_clear = self.clear.get(person.person) is person
        self.clear[person.person] = person
        if is_clear and attribute != "name" and self.rng.random() < 0.7:
            return person.form("he")
        return self.expand(person.name)

    def _look_up(self, name: str) -> Any:
        word, number, star = _NUMBERED.fullmatch(name).groups()  # type: ignore[union-attr]
        of = self.words.get("words", {}).get(word) or phrases["words"][word]
        value = self._choose(of.split(", ") if isinstance(of, str) else of)
        if not star:
            self.slots[word + number] = value
        return value

    def _choose(self, choices: list[str]) -> Any:
        """Return a chosen text; the parts of one that has semicolons."""
        entry = self.expand(self.pick(choices))
        return entry.split("; ") if "; " in entry else entry

    def set(self, **choices: Any) -> None:
        """Give each slot one of its choices, expanded once."""
        for slot, of in choices.items():
            self.slots[slot] = self._choose(of)

    def expand(self, template: str) -> str:
        """Return the template with its choices made and its slots filled; "said I" becomes "I said"."""
        text = _SAID_I.sub(r"\2 \1", super().expand(template))
        return _END.sub(r"\1", re.sub(r" +(?=[,.!?])", "", text))


def _third(phrase: str) -> str:
    """Return "goes home" for "go home"."""
    verb, space, rest = phrase.partition(" ")
    if verb in ("have", "be"):
        verb = {"have": "has", "be": "is"}[verb]
    elif verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    else:
        verb += "s"
    return verb + space + rest


def _past(phrase: str) -> str:
    """Return "went home" for "go home"."""
    verb, space, rest = phrase.partition(" ")
    if verb in phrases["past"]:
        verb = phrases["past"][verb]
    elif verb.endswith("e"):
        verb += "d"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ied"
    else:
        verb += (verb[-1] if verb in _doubling() else "") + "ed"
    return verb + space + rest


def _ing(phrase: str) -> str:
    """Return "going home" for "go home"."""
    verb, space, rest = phrase.partition(" ")
    if verb.endswith("ie"):
        verb = verb[:-2] + "y"
    elif verb.endswith("e") and not verb.endswith(("ee", "be", "ye")):
        verb = verb[:-1]
    elif verb in _doubling():
        verb += verb[-1]
    return verb + "ing" + space + rest


def _plural(phrase: str) -> str:
    """Return "small boxes" for "small box"."""
    before, space, noun = phrase.rpartition(" ")
    if noun in phrases["plurals"]:
        noun = phrases["plurals"][noun]
    elif noun.endswith("y") and noun[-2] not in "aeiou":
        noun = noun[:-1] + "ies"
    elif noun.endswith(("s", "sh", "ch", "x", "z")):
        noun += "es"
    else:
        noun += "s"
    return before + space + noun


_INFLECT: dict[str, Callable[[str], str]] = {"past": _past, "ing": _ing, "third": _third, "plural": _plural}


@cache
def _doubling() -> frozenset[str]:
    return frozenset(phrases["doubling"].split())


def telling(scene: Scene, sources: tuple[str, ...] = TOLD) -> None:
    """Tell a text that was written as a whole, so that each sentence follows from the last; or a few short ones."""
    source = scene.rng.choices(sources, [len(phrases[source]) for source in sources])[0]
    for _ in range(scene.rng.randint(1, 3) if source == "in_short" else 1):
        chosen = scene.pick(phrases[source])
        scene.words = {**scene.words, "words": chosen.get("words", {})}
        scene.slots.clear()
        scene.named.clear()
        scene.meet("h", chosen.get("hero", "me me name name name"))
        _other(scene)
        scene.tell(chosen["text"])


def letter(scene: Scene) -> None:
    """Write a letter in the first person."""
    scene.meet("h", "me")
    to, sender = (scene.pick(phrases["people"]["name"][g].split(", ")) for g in scene.rng.choice(("mf", "fm", "ff")))
    chosen = scene.pick(phrases["letters"])
    scene.words = chosen
    scene.slots |= {"to": to, "sender": sender, "about": chosen["about"]}
    scene.tell(scene.pick(phrases["greetings"]))
    start = scene.pick(phrases["letter_starts"]) + " " if scene.rng.random() < 0.4 else ""
    scene.tell(start + chosen["text"])
    scene.tell(scene.pick(phrases["letter_ends"]))
    scene.tell(scene.pick(phrases["farewells"]))


def diary(scene: Scene) -> None:
    """Write an entry of a diary."""
    scene.meet("h", "me")
    scene.tell(scene.pick(phrases["dates"]))
    scene.tell(scene.pick(phrases["diaries"])["text"])
    if scene.rng.random() < 0.4:
        scene.tell(scene.pick(phrases["diary_ends"]))


def recipe(scene: Scene) -> None:
    """Explain how a dish is made, from one of the recipes."""
    chosen = scene.pick(phrases["recipes"])
    scene.words = chosen
    scene.set(meal=[chosen["name"]], needs=[chosen["needs"]])
    scene.tell(scene.pick(phrases["recipe_starts"]))
    steps = []
    for number, step in enumerate(chosen["steps"]):
        text = scene.expand(("{First|To begin with}, " if number == 0 else scene.rng.choice(phrases["links"])) + step)
        steps.append(f"{text[0].upper()}{text[1:]}.")
    scene.tell(" ".join(steps))
    scene.tell(scene.pick(chosen["ends"]))


def directions(scene: Scene) -> None:
    """Explain the way from one place to another."""
    scene.meet("h", "name me")
    _other(scene)
    scene.tell(scene.pick(phrases["way_starts"]))
    scene.tell(" ".join(scene.pick(phrases["ways"]) for _ in range(scene.rng.randint(2, 5))))
    scene.tell(scene.pick(phrases["way_ends"]))


def facts(scene: Scene) -> None:
    """State a few true facts about one thing."""
    topic = scene.pick(phrases["facts"])
    sentences = scene.rng.sample(topic["say"], min(len(topic["say"]), scene.rng.randint(3, 5)))
    scene.tell(" ".join((scene.pick(topic["is"]), *sentences)))


def forecast(scene: Scene) -> None:
    """Report the weather."""
    choices = phrases["forecasts"]
    forecasts = [choices[at] for at in sorted(scene.rng.sample(range(len(choices)), scene.rng.randint(3, 5)))]
    scene.tell(" ".join((scene.pick(phrases["forecast_starts"]), *forecasts)))


def _other(scene: Scene) -> None:
    scene.meet("f", "name kin kin friend")
    scene.meet("g", "role")


KINDS: dict[str, tuple[Callable[[Scene], None], int]] = {  # with how often each is written
    "telling": (telling, 100),
    "letter": (letter, 6),
    "diary": (diary, 3),
    "recipe": (recipe, 6),
    "directions": (directions, 4),
    "facts": (facts, 8),
    "forecast": (forecast, 3),
}


def write_everyday(number: int, seed: int = 0, kind: str | None = None) -> str:
    """Write the everyday text of this number."""
    rng = random.Random(f"everyday {seed} {number}")
    weights = [weight for _, weight in KINDS.values()]
    kind = kind or rng.choices(list(KINDS), weights)[0]
    scene = Scene(rng)
    KINDS[kind][0](scene)
    return "\n\n".join(scene.text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3, help="texts to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=list(KINDS), help="default: all kinds")
    args = parser.parse_args()
    print("\n\n* * *\n\n".join(write_everyday(number, args.seed, args.kind) for number in range(args.count)))
