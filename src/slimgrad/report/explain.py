"""What a module keeps, in plain sentences."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from slimgrad.errors import SpecError
from slimgrad.report.human import human_bytes, need_name, path_name, plural, tensor_name, wrapped

if TYPE_CHECKING:
    from slimgrad.spec import Need, Profile, Site, Storage

MEANING = {
    "NOTHING": "the value is never read, only its shape",
    "WEIGHT": "it is a parameter, a view of one, or its autocast copy",
    "INDEX": "small integers, such as positions inside a pooling window",
    "MASK": "one bit per element",
    "DERIVATIVE": "only the derivative of a pointwise function",
    "OPERAND": "it enters the gradient of a parameter only",
    "VALUES": "its values enter the gradient that flows on",
    "EXACT": "it must not change, or nothing is known about it",
}
"""What each need means, in words."""


def explanation(profile: Profile, path: str, instead: Mapping[Need, str]) -> str:
    """Plain sentences on what the modules at `path` save, who else keeps it, and what could be kept instead.

    `path` is a module path, the path of a module above, or a glob such as 'layer1.*'.
    """
    paths = matching_paths(profile, path)
    return "\n\n".join(module_story(profile, found, instead) for found in paths)


def matching_paths(profile: Profile, path: str) -> list[str]:
    """The module paths that `path` means, in the order in which they saved."""
    known = list(dict.fromkeys(site.path for site in profile.sites))
    wanted = "" if path == path_name("") else path
    if wanted in known:
        return [wanted]
    found = [name for name in known if name.startswith(f"{wanted}.") or fnmatchcase(name, wanted)]
    if not found:
        raise SpecError(unknown_path(path, known))
    return found


def unknown_path(path: str, known: list[str]) -> str:
    close = difflib.get_close_matches(path, known, n=3, cutoff=0.5)
    hint = f"close matches: {', '.join(map(repr, close))}" if close else some_paths(known)
    return f"no module at {path!r} saves anything in this profile; {hint}"


def some_paths(known: list[str]) -> str:
    shown = ", ".join(repr(path_name(name)) for name in known[:5])
    return f"modules that do: {shown}{', …' if len(known) > 5 else ''}" if known else "no module does"


def module_story(profile: Profile, path: str, instead: Mapping[Need, str]) -> str:
    sites = [site for site in profile.sites if site.path == path]
    lines = [f"{path_name(path)} ({sites[0].module}) saves {plural(len(sites), 'tensor')}."]
    for site in sorted(sites, key=lambda site: -site.bytes):
        size, *sentences = site_story(profile, site, instead)
        lines += ["", wrapped(size, "  ", "    "), *(wrapped(sentence, "    ", "      ") for sentence in sentences)]
    beneath = sum(1 for name in {site.path for site in profile.sites} if path and name.startswith(f"{path}."))
    if beneath:
        lines += ["", f"  {plural(beneath, 'module')} beneath it save more: ask for '{path}.*'."]
    return "\n".join(lines)


def site_story(profile: Profile, site: Site, instead: Mapping[Need, str]) -> list[str]:
    storage = profile.storages[site.storage]
    need = need_name(site.need)
    lines = [
        size_sentence(site, storage),
        f"{site.node}.{site.slot} needs {need} of it: {MEANING[need]}{function_clause(site)}.",
    ]
    others = [other for i in storage.savers if (other := profile.sites[i]) is not site]
    if others:
        lines.append(f"The same storage is also kept by {', '.join(saver_phrase(other) for other in others)}.")
    if not storage.counted:
        return [*lines, f"It is {article(storage.kind)} and lives on anyway: letting go of it frees nothing."]
    return [*lines, f"Could be kept instead: {instead[site.need]}.", *condition(site, others)]


def size_sentence(site: Site, storage: Storage) -> str:
    call = f" by call {site.call}" if site.call else ""
    origin = f" made by {site.producer}" if site.producer else ""
    if site.parameter:
        origin = f", the parameter {site.parameter}"
    view = f", a view into a storage of {human_bytes(storage.bytes)}" if storage.bytes > site.bytes else ""
    return f"{human_bytes(site.bytes)}{call}: {tensor_name(site.shape, site.dtype)}{origin}{view}."


def function_clause(site: Site) -> str:
    return f" (here {site.fn})" if site.fn and need_name(site.need) in ("MASK", "DERIVATIVE") else ""


def saver_phrase(site: Site) -> str:
    return f"{path_name(site.path)} ({site.node}.{site.slot}, needs {need_name(site.need)})"


def article(kind: str) -> str:
    return f"an {kind}" if kind[:1] in "aeiou" else f"a {kind}"


def condition(site: Site, others: list[Site]) -> list[str]:
    """What stands in the way of freeing a storage that others keep too."""
    if not others:
        return []
    stronger = [other for other in others if other.need.rank > site.need.rank]
    if not stronger:
        return ["The storage is freed only when every saver lets go of it."]
    names = ", ".join(dict.fromkeys(path_name(other.path) for other in stronger))
    return [f"But more of it is needed by {names}: the storage is freed only when every saver lets go of it."]
