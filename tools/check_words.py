#!/usr/bin/env python3
"""Finds phrases in comments, texts and messages that readers had to decode, and says what to write instead.

Reads all tracked files that people read (C++, Markdown, Python, CMake, dev) line by line. In Markdown it also finds
prose of more than 100 columns; tables, code and quoted output may be wider.

    tools/check_words.py [FILE…]      exit status 0: nothing found; 1: findings, one per line

The list is short on purpose: each phrase is wrong wherever it stands. A line that needs one all the same (a quotation)
says "words: ok".
"""
import pathlib
import re
import subprocess
import sys

UNIT = "(call|core|device|epoch|file|group|host|job|line|message|node|operation|peer|process|rank|second|step|thread|worker)"
PHRASES = [
    (r"\bat once\b", "immediately, or: concurrently, at the same time"),
    (r"\bbelieves? in\b", "expects"),
    (r"\b(a|an|the) own\b", "its own, a separate"),
    (r"\bof its own accord\b", "by itself"),
    (r"\blest\b", "so that … not"),
    (r"\bthat there (is|are) not\b", "that does not exist"),
    (r"\basks for no gradient\b", "does not require grad"),
    (r"\b(ask|asks|asked) for no (?!gradient)", "does not ask for"),
    (r"\bmakes? no jobs?\b", "expected …, got …"),
    # Good: "there is no file"; "is no longer". A line that begins with "is no" may continue a "there" of the line before.
    (r"(?<=[\w'\"`)] )(?<!there )(is|are|was|were) no (?!(longer|more|less|fewer|better|worse|faster|slower|larger|"
     r"smaller|greater|different)\b)\w+", "is not a"),
    (r"(?<!depend )(?<!depends )(?<!based )\bon order\b", "injected, on request"),
    # Good: "the one with a line", "who sends one gets a process". A word in -s after "one" is a verb, not a noun.
    (r"\bone (?!(a|an|and|as|at|by|for|from|had|has|in|is|of|on|or|per|than|that|to|was|which|with)\b)(\w*[^\Ws]|\w*ss) "
     rf"an? {UNIT}\b", "per"),
    (rf"\bone an? {UNIT}\b", "one per"),
    # Programs want nothing. Users do.
    (r"(?<!user )(?<!users )(?<!you )(?<!who )\b(do|does|did) not want\b", "does not need, refuses, must not"),
]
COLUMNS = 100
READ = {".h", ".cpp", ".md", ".py", ".txt", ".cmake", ".in", ".sh", ".1", ".pml"}
EXCEPT = {"tools/check_words.py", "tests/dev/check_words_test.py"}


def phrases_in(line):
    """The (phrase, better words) of a line."""
    if "words: ok" in line:
        return []
    return [(match[0], better) for pattern, better in PHRASES if (match := re.search(pattern, line, re.IGNORECASE))]


def wide_lines_in(text):
    """The numbers of the lines of a Markdown text that are prose and too wide."""
    fenced, found = False, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif len(line) > COLUMNS and not fenced and not line.startswith(("|", "    ")):
            found.append(number)
    return found


def files(root):
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if name not in EXCEPT and (pathlib.Path(name).suffix in READ or name == "dev")]


def main():
    root = pathlib.Path(__file__).resolve().parents[1]
    names = sys.argv[1:] or files(root)
    found = 0
    for name in names:
        text = (root / name).read_text()
        for number, line in enumerate(text.splitlines(), 1):
            for phrase, better in phrases_in(line):
                print(f"{name}:{number}: '{phrase}': write {better}")
                found += 1
        for number in wide_lines_in(text) if name.endswith(".md") else []:
            print(f"{name}:{number}: wrap at {COLUMNS} columns")
            found += 1
    print(f"check_words: {len(names)} files, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
