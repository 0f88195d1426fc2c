#!/usr/bin/env python3
"""docs/security.md and docs/architecture.md name tests and places in the code: all of them must be there.

CONTRIBUTING.md names the files that a new collective touches: those that name scan, the newest one.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def code(path):
    """The text of a file, or of all sources in a folder."""
    if path.is_dir():
        return "\n".join(each.read_text() for each in sorted(path.iterdir()) if each.suffix in (".cpp", ".h"))
    return path.read_text() if path.is_file() else None


PAGES = {"security.md": 100, "architecture.md": 35}  # and how many names they have at least


def check(page, known):
    """What is wrong with the names of a page, and how many there are."""
    wrong, checked = [], 0
    for name in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
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
    return wrong, checked


def check_places_of_a_collective():
    """What is wrong with the section of CONTRIBUTING.md about a new collective."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## To add a collective") : page.index("## To add a backend")]
    named = {Path(name).name for name in re.findall(r"`([\w./]+\.(?:cpp|h))`", section)}
    sources = [each for suffix in ("cpp", "h") for each in (ROOT / "src").rglob(f"*.{suffix}")]
    those_of_scan = [each for each in sources if re.search(r"\bkScan\b", each.read_text())]
    wrong = [f"{each.relative_to(ROOT)} names kScan, but the page does not name it" for each in those_of_scan
             if each.name not in named]
    if len(those_of_scan) != 8:
        wrong.append(f"{len(those_of_scan)} files name kScan, but the page says eight")
    return wrong


def main():
    tests = "\n".join(each.read_text() for suffix in ("cpp", "h") for each in (ROOT / "tests").rglob(f"*.{suffix}"))
    known = set(re.findall(r"TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", tests))
    failed = False
    for name, least in PAGES.items():
        page = (ROOT / "docs" / name).read_text()
        wrong, checked = check(page, known)
        if name == "security.md":
            for line in page.splitlines():  # a row of a table that says what is checked names a test
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                if line.startswith("| ") and len(cells) == 3 and cells[0] not in ("Check",) and not cells[2]:
                    wrong.append(f"no test for: {cells[0]}")
        if checked < least:
            wrong.append(f"only {checked} names were found; has the page's form changed?")
        for each in wrong:
            print(f"docs/{name}: {each}", file=sys.stderr)
        failed = failed or bool(wrong)
    for each in check_places_of_a_collective():
        print(f"CONTRIBUTING.md: {each}", file=sys.stderr)
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
