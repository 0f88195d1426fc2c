#!/usr/bin/env python3
"""docs/security.md names tests and places in the code: all of them must be there."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def code(path):
    """The text of a file, or of all sources in a folder."""
    if path.is_dir():
        return "\n".join(each.read_text() for each in sorted(path.iterdir()) if each.suffix in (".cpp", ".h"))
    return path.read_text() if path.is_file() else None


def main():
    page = (ROOT / "docs" / "security.md").read_text()
    tests = "\n".join(each.read_text() for suffix in ("cpp", "h") for each in (ROOT / "tests").rglob(f"*.{suffix}"))
    known = set(re.findall(r"TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", tests))
    wrong, checked = [], 0
    for name in re.findall(r"`([^`]+)`", page):
        if match := re.fullmatch(r"([A-Z]\w+)\.([A-Z]\w+)", name):
            checked += 1
            if match.groups() not in known:
                wrong.append(f"there is no test {name}")
        elif match := re.fullmatch(r"((?:src|include|tools)/[\w./]+):(\w+)", name):
            checked += 1
            text = code(ROOT / match[1])
            if text is None:
                wrong.append(f"there is no {match[1]}")
            elif not re.search(rf"\b{match[2]}\b", text):
                wrong.append(f"{match[1]} has no {match[2]}")
        elif re.fullmatch(r"tests/[\w./]+", name):
            checked += 1
            if not (ROOT / name).exists():
                wrong.append(f"there is no {name}")
    for line in page.splitlines():  # a row of a table that says what is checked names a test
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("Check",) and not cells[2]:
            wrong.append(f"no test for: {cells[0]}")
    if checked < 100:
        wrong.append(f"only {checked} names were found in docs/security.md; has its form changed?")
    for each in wrong:
        print(f"docs/security.md: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
