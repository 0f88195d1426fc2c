#!/usr/bin/env python3
"""Checks that each source of src/ includes what it uses of Muster.

A unity build compiles many sources as one, so it hides that one of them lacks an include; a build of Muster inside
another project (add_subdirectory) compiles them one by one, and fails. This check reads only text: it knows the types,
functions and constants that headers declare in a namespace, and looks in each source for names of which no declaration
is in the headers that the source includes, directly or not. It also looks for headers of libtorch that the oldest version
lacks with which Muster builds.

    tools/check_includes.py [ROOT]      exit status 0: complete; 1: one line for each name that is missing; 2: wrong usage
"""
import collections
import pathlib
import re
import sys

TORCHS = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.M)
NEWER = {"torch/csrc/autograd/graph/node.h": "torch/csrc/autograd/function.h"}  # what to include in libtorch 2.11
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
COMMENTS_AND_STRINGS = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
NAMESPACE = re.compile(r"(?:inline\s+)?namespace\s*[\w:]*\s*$")
TYPE = re.compile(r"\b(?:class|struct|enum(?:\s+class)?|union|concept)\s+(?:\[\[\w+\]\]\s*|alignas\(\w+\)\s*)?(\w+)\s*(?:final\s*)?(?::(?!:)[^;{]*)?$")
FUNCTION = re.compile(r"[\w>&*\]]\s*[\s&*]\s*(\w+)\s*\(")
CONSTANT = re.compile(r"\b(?:constexpr|const|extern)\b[^=({;]*?\b(\w+)(?:<[^=]*>)?\s*(?:=|\{|;|\[|$)")
ALIAS = re.compile(r"\busing\s+(\w+)\s*=")
# Names of one word are also those of variables: they are looked for only where they are called. These are called without
# a declaration of Muster: a keyword, and members of a base class in libtorch.
OTHERS = {"sizeof", "finish"}
SEVERAL_WORDS = re.compile(r"[a-z0-9]+_\w*[a-z0-9]|[A-Z][a-z0-9]+[A-Z]\w*|k[A-Z]\w+")
USE = re.compile(r"(?<![\w.:>~])(?:(?:muster|base|shm|comm|store|transport|launch|rpc|parallel|checkpoint)::)*(\w+)\b")
CALL = re.compile(r"(?<![\w.:>~])(\w+)\(")


def without_comments(text):
    return COMMENTS_AND_STRINGS.sub(lambda match: "\n" * match.group().count("\n") or " ", text)


def statements(text):
    """Yields what stands at namespace level, statement by statement, without the bodies of functions and types."""
    text = re.sub(r"^\s*#(?:[^\n\\]|\\.)*(?:\\\n[^\n]*)*", "", without_comments(text), flags=re.M)
    depth, begin, position = 0, 0, 0
    for position, sign in enumerate(text):
        if sign == "{":
            if depth == 0:
                head = text[begin:position]
                begin = position + 1
                if NAMESPACE.search(head) or re.search(r'extern\s*$', head):
                    continue
                yield head
            depth += 1
        elif sign == "}":
            if depth > 0:
                depth -= 1
            begin = position + 1
        elif sign == ";" and depth == 0:
            yield text[begin:position]
            begin = position + 1


def declared(text):
    names = set()
    for statement in statements(text):
        statement = re.sub(r"template\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>", " ", statement).strip()
        if not statement or statement.startswith(("friend", "static_assert")):
            continue
        if found := ALIAS.search(statement):
            names.add(found.group(1))
        elif found := TYPE.search(statement):
            names.add(found.group(1))
        elif found := FUNCTION.search(statement):
            names.add(found.group(1))
        elif found := CONSTANT.search(statement):
            names.add(found.group(1))
    return names


def main(arguments):
    if len(arguments) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent.parent)
    texts = {}
    for folder in ("src", "include"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".h", ".cpp"):
                texts[str(path.relative_to(root / folder))] = path.read_text()
    includes = {name: INCLUDE.findall(text) for name, text in texts.items()}
    places = collections.defaultdict(set)  # name: the headers that declare it
    for name, text in texts.items():
        if name.endswith(".h"):
            for each in declared(text):
                places[each].add(name)

    plain = {name: without_comments(text) for name, text in texts.items()}
    missing = 0
    for name, text in texts.items():
        for header in NEWER.keys() & set(TORCHS.findall(text)):
            print(f"{name}: libtorch 2.11 has no <{header}>: include <{NEWER[header]}>")
            missing += 1
        if not name.endswith(".cpp"):
            continue
        seen, todo = set(), [name]
        while todo:
            file = todo.pop()
            if file not in seen and file in includes:
                seen.add(file)
                todo += includes[file]
        used = {word for word in USE.findall(plain[name]) if SEVERAL_WORDS.fullmatch(word)}
        used |= set(CALL.findall(plain[name])) - OTHERS
        for word in sorted(used & places.keys()):
            own = re.compile(rf"(?<!\breturn)(?<!\bcase)(?<!\bthrow)(?:(?<=\w)\s+|(?<=[\w>])[&*]+\s+|>\s+|\]\s*){word}\s*[=(){{;,:]|,\s*{word}\s*[={{;]|\b(?:class|struct|enum)\s+(?:alignas\(\w+\)\s*)?{word}\b")
            if places[word] & seen or any(own.search(plain[file]) for file in seen):
                continue
            print(f"{name}: {word} is declared in {', '.join(sorted(places[word]))}, which it does not include")
            missing += 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
