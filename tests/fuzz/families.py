"""All families of cases."""

from fuzz import calls, commands, files, requests
from fuzz.harness import Family

FAMILIES: list[Family] = [*files.FAMILIES, *calls.FAMILIES, *commands.FAMILIES, *requests.FAMILIES]
