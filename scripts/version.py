"""The version of all distributions, which are released together.

Usage::

    python scripts/version.py            # print it
    python scripts/version.py --check    # fail if a distribution has another one
    python scripts/version.py 0.2.0      # write it wherever it stands

It is that of the core, ``core/src/arb_ternary/__init__.py``. The other distributions repeat it in
their packages, the metapackage in ``pyproject.toml``; and distributions require each other from
this minor version on, up to the next one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "src" / "arb_ternary" / "__init__.py"

#: In packages, the metapackage, its exact requirements, and requirements of all others.
_ASSIGNED = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
_METAPACKAGE = re.compile(r'^version = "(.*)"$', re.MULTILINE)
_EXACT = re.compile(r'(?<="arb-ternary-)([a-z-]+)==([^",;]+)')
_RANGE = re.compile(r'(?<="arb-ternary-)([a-z-]+(?:\[[a-z,-]+\])?)(>=[^",;]+,<[^",;]+)')


def current() -> str:
    """Return the version of the core."""
    found = _ASSIGNED.search(CORE.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def ranged(version: str) -> str:
    """Return the versions that go with a version: until 1.0 those of its minor version."""
    major, minor = version.split(".")[:2]
    lowest = f"{major}.{minor}" if re.fullmatch(r"[\d.]+", version) else version
    if major == "0":
        return f">={lowest},<0.{int(minor) + 1}"
    return f">={lowest},<{int(major) + 1}"


def rewritten(file: Path, version: str) -> str:
    """Return the text of a file with the version in it."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return _ASSIGNED.sub(f'__version__ = "{version}"', text)
    text = _EXACT.sub(rf"\g<1>=={version}", text)
    text = _RANGE.sub(rf"\g<1>{ranged(version)}", text)
    if file.parent == ROOT:
        text = _METAPACKAGE.sub(f'version = "{version}"', text, count=1)
    return text


def files() -> list[Path]:
    """Return the files that the version stands in."""
    found = [ROOT / "pyproject.toml"]
    for pattern in ("core", "plugins/*", "backends/*"):
        found += sorted(ROOT.glob(f"{pattern}/pyproject.toml"))
        found += sorted(ROOT.glob(f"{pattern}/src/*/__init__.py"))
    return found


def main() -> int:
    """Print, check or write the version."""
    asked = sys.argv[1:]
    if not asked:
        print(current())
        return 0
    checks = asked == ["--check"]
    version = current() if checks else asked[0]
    if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", version) is None:
        print(f"error: {version!r} is no version such as 0.2.0 or 0.2.0rc1", file=sys.stderr)
        return 2
    others = [file for file in files() if rewritten(file, version) != file.read_text("utf-8")]
    for file in others:
        if checks:
            print(f"error: {file.relative_to(ROOT)}: it is not {version}", file=sys.stderr)
        else:
            file.write_text(rewritten(file, version), encoding="utf-8")
    return 1 if checks and others else 0


if __name__ == "__main__":
    sys.exit(main())
