"""Write questions of many kinds, from which the draft of SmolLM2 learned: JSON lines for `draftwood distill --prompts`.

    apt-get install wordnet-base dict-foldoc dict-jargon debian-handbook
    python -m models.demo.questions --num 30000 --seed 1 --output questions.jsonl

questions.txt has the forms. Nouns, terms and passages come from the packages above. Test sets are not read.
"""

from __future__ import annotations

import argparse
import gzip
import html
import inspect
import json
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import FunctionType

FORMS = Path(__file__).with_suffix(".txt")
WORDNET = Path("/usr/share/wordnet")
DICTIONARIES = Path("/usr/share/dictd")
HANDBOOK = Path("/usr/share/doc/debian-handbook/html")
# Lexicographer files of WordNet (lexnames(5WN)), by the word that a form has for them.
NOUNS = {
    "act": 4,
    "animal": 5,
    "thing": 6,
    "quality": 7,
    "idea": 9,
    "event": 11,
    "feeling": 12,
    "food": 13,
    "group": 14,
    "place": 15,
    "phenomenon": 19,
    "person": 18,
    "plant": 20,
    "state": 26,
    "substance": 27,
}
FREQUENT = 700  # nouns of each kind, the most frequent ones
SHORTEST, LONGEST = 200, 900  # characters of a passage
# Modules whose documented functions are asked about.
MODULES = ["textwrap", "shutil", "statistics", "random", "inspect", "json", "os", "tokenize", "ast"]
MODULES += ["numpy", "numpy.linalg", "onnx.helper"]
TONGUES = {"German": "de-DE", "French": "fr-FR", "Spanish": "es-ES", "Italian": "it-IT"}
NUMBERS = {"small": (2, 12), "number": (10, 99), "large": (100, 999), "percent": (5, 95)}
# How often each kind of question is asked, in hundredths, roughly.
WEIGHTS = {
    "knowledge": 17,
    "writing": 13,
    "advice": 11,
    "tasks": 12,
    "sums": 17,
    "programs": 8,
    "signatures": 7,
    "functions": 3,
    "about": 9,
    "definitions": 5,
    "translations": 3,
}
PLACEHOLDER = re.compile(r"\{(\w+)\}")
UNNAMED = {"a", "of", "the", "by", "two", "its", "with", "and", "that", "whether", "how", "every", "all", "each"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=30_000, help="questions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="files of questions that are left out")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    known = {json.loads(line)["prompt"] for path in args.without for line in path.read_text().splitlines()}
    makers = question_makers(random.Random(args.seed))
    rng = random.Random(args.seed + 1)
    asked: set[str] = set()
    while len(asked) < args.num:
        (kind,) = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        asked.add(makers[kind]())
    questions = sorted(asked)
    rng.shuffle(questions)
    new = [question for question in questions if question not in known]
    args.output.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in new))


def question_makers(rng: random.Random) -> dict[str, Callable[[], str]]:
    """A function for each kind of WEIGHTS that makes one question of it."""
    words, forms = read_forms("words"), read_forms("forms")
    banks = {**read_nouns(), **words}
    passages = read_articles("foldoc") + read_articles("jargon")
    passages += [(rng.choice(text.split()).strip(".,()"), text) for text in read_handbook("en-US")]
    foreign = [(name, text) for name, code in TONGUES.items() for text in read_handbook(code) if len(text) < 300]
    glosses, functions = read_glosses(), read_functions(MODULES)

    def filled(kind: str) -> Callable[[], str]:
        return lambda: fill(rng.choice(forms[kind]), banks, rng)

    def signature() -> str:
        arguments, call = rng.choice(forms["arguments"]).split(" => ")
        call = fill(call, banks, rng)
        values = {"arguments": arguments, "call": call, "type": rng.choice(forms["types"])}
        values["result"] = call.split(",")[0].strip("[")
        return fill(rng.choice(forms["signatures"]), banks, rng, values)

    def paired(kind: str, pairs: Sequence[tuple[str, str]], *names: str) -> Callable[[], str]:
        def one() -> str:
            values = dict(zip(names, rng.choice(pairs), strict=True))
            return PLACEHOLDER.sub(lambda match: values[match[1]], rng.choice(forms[kind]))

        return one

    return {
        **{kind: filled(kind) for kind in ("knowledge", "writing", "advice", "tasks", "sums", "programs")},
        "signatures": signature,
        "functions": paired("functions", functions, "signature", "doc"),
        "about": paired("about", passages, "term", "passage"),
        "definitions": paired("definitions", glosses, "term", "gloss"),
        "translations": paired("translations", foreign, "tongue", "text"),
    }


def fill(form: str, banks: Mapping[str, list[str]], rng: random.Random, values: Mapping[str, str] | None = None) -> str:
    """The form with its placeholders filled by values, numbers, words. {deed} and {deed_name} are the same deed."""
    deed = rng.choice(banks["deed"])
    name = "_".join(re.sub(r"\W+", "", word) for word in deed.split() if word not in UNNAMED)
    fixed = {**(values or {}), "deed": deed, "deed_name": name.lower()[:32].rstrip("_")}

    def one(match: re.Match[str]) -> str:
        kind = match[1]
        if kind in fixed:
            return fixed[kind]
        return str(rng.randint(*NUMBERS[kind])) if kind in NUMBERS else rng.choice(banks[kind])

    return PLACEHOLDER.sub(one, form)


def read_forms(section: str) -> dict[str, list[str]]:
    """Of "forms" or "words": the lists by their names."""
    found = {}
    for part in FORMS.read_text().split("\n\n## ")[1:]:
        title, _, body = part.partition("\n")
        kind, name = title.split(": ")
        if kind == section:
            found[name] = [form.replace("\\n", "\n") for form in body.strip("\n").replace(" |\n", " | ").split(" | ")]
    return found


def read_nouns() -> dict[str, list[str]]:
    """Nouns of WordNet by kind, the most frequent ones of its tagged texts; "noun" has all kinds."""
    counts: dict[tuple[str, int], int] = {}
    for line in (WORDNET / "cntlist.rev").read_text().splitlines():
        sense, _, count = line.split()
        lemma, _, rest = sense.partition("%")
        part_of_speech, file = rest.split(":")[:2]
        if part_of_speech == "1":
            key = (lemma.replace("_", " "), int(file))
            counts[key] = max(counts.get(key, 0), int(count))
    ranked = sorted(counts, key=lambda key: (-counts[key], key))
    found = {kind: [lemma for lemma, file in ranked if file == number][:FREQUENT] for kind, number in NOUNS.items()}
    return {**found, "noun": sorted({lemma for lemmas in found.values() for lemma in lemmas})}


def read_glosses() -> list[tuple[str, str]]:
    """Nouns of WordNet, names among them, with what they mean."""
    found = []
    for line in (WORDNET / "data.noun").read_text().splitlines():
        if not line.startswith("  "):  # the licence
            record, _, gloss = line.partition(" | ")
            found.append((record.split()[4].replace("_", " "), gloss.split(";")[0].strip()))
    return found


def read_articles(dictionary: str) -> list[tuple[str, str]]:
    """Terms of a dictionary in dictd's form and their articles, those of the length of a passage."""
    text = gzip.decompress((DICTIONARIES / f"{dictionary}.dict.dz").read_bytes()).decode("utf-8", "ignore")
    found = []
    for article in re.split(r"\n(?=\S)", text):
        term, _, body = article.partition("\n")
        passage = " ".join(re.sub(r"[{}]|<[^>]*>|\(\d{4}-\d\d-\d\d\)", "", body).split())
        if SHORTEST < len(passage) < LONGEST:
            found.append((term.strip(), passage))
    return found


def read_handbook(language: str) -> list[str]:
    """Paragraphs of the Debian Administrator's Handbook in a language, such as "de-DE"."""
    found = []
    for page in sorted((HANDBOOK / language).glob("*.html")):
        for paragraph in re.findall(r'<div class="para">(.*?)</div>', page.read_text(errors="ignore"), re.DOTALL):
            text = " ".join(html.unescape(re.sub(r"<[^>]*>", "", paragraph)).split())
            if SHORTEST / 3 < len(text) < LONGEST:
                found.append(text)
    return found


def read_functions(modules: Sequence[str]) -> list[tuple[str, str]]:
    """Signatures of documented Python functions with what their docstrings say first."""
    found = set()
    for name in modules:
        for function in vars(import_module(name)).values():
            doc = inspect.getdoc(function) if isinstance(function, FunctionType) else None
            if doc and len(doc) > 40:
                signature = f"def {function.__name__}{inspect.signature(function)}:"
                if "0x" not in signature and len(signature) < 120:
                    found.add((signature, textwrap.shorten(doc.split("\n\n")[0], 400)))
    return sorted(found)


if __name__ == "__main__":
    main()
