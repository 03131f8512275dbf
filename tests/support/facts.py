"""What modules say of given things, as digests: a change that nobody wanted shows in a test of milliseconds.

    python -m tests.support.facts                  write tests/data/facts.json anew, after a change that is wanted
    python -m tests.support.facts --show TOPIC     print what the digests are of: compare that of two trees

A topic is a module of tests with a function `facts()`, which yields (name, anything): `TOPICS`."""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "data" / "facts.json"
TOPICS = {
    "problems": "tests.model.test_facts_of_problems",
    "answers": "tests.correctness.test_facts_of_answers",
    "expressions": "tests.model.test_facts_of_expressions",
    "cards": "tests.model.test_facts_of_cards",
    "estimates": "tests.cost.test_facts_of_estimates",
    "summaries": "tests.report.test_facts_of_summaries",
    "exports": "tests.export.test_facts_of_exports",
    "samplers": "tests.samplers.test_facts_of_samplers",
    "calls": "tests.ops.test_facts_of_calls",
    "masks": "tests.ops.test_facts_of_masks",
    "breeding": "tests.portfolio.test_facts_of_breeding",
    "records": "tests.storage.test_facts_of_records",
    "searching": "tests.search.test_facts_of_searches",
    "finals": "tests.timing.test_facts_of_finals",
    "families": "tests.families.test_facts_of_families",
}
DIGITS = 5
"""Of the significant ones of a number: another order of sums is no other fact."""
HEX_DIGITS = 6
UNLIKE = ("TypeError", "AttributeError", "KeyError")
"""What a method says of arguments that it does not take."""


def plain(value: Any) -> str:
    """As text, with numbers of DIGITS digits, dataclasses by their fields, and callables by their names."""
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {plain(each)}" for name, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(plain, value)) + "]"
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return type(value).__name__ + plain({name: getattr(value, name) for name in value.__dataclass_fields__})
    if callable(value):
        return getattr(value, "__name__", "a callable")
    return plain(vars(value)) if repr(value) == object.__repr__(value) else repr(value)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]


def answer(call: Any, *arguments: Any) -> Any:
    """What a call gives, or the error that it raises: our sentences, of Python's own the kind alone."""
    try:
        return call(*arguments)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return type(error).__name__


def told(thing: object, *arguments: tuple[Any, ...], without: Iterable[str] = ()) -> dict[str, Any]:
    """By name what its public properties are, and what its methods give for each of the arguments that they take."""
    found = {}
    for name in sorted(name for name in dir(type(thing)) if not name.startswith("_") and name not in without):
        value = answer(getattr, thing, name)
        takes = [given for given in arguments if callable(value)]
        answers = {str(given): answer(value, *given) for given in takes}
        found[name] = {given: it for given, it in answers.items() if it not in UNLIKE} if takes else value
    return found


def changed(topic: str) -> list[str]:
    """The facts of a topic that are not as they were, as a sentence each."""
    known = json.loads(RECORD.read_text())[topic]
    found = {name: digest(plain(value)) for name, value in import_module(TOPICS[topic]).facts()}
    assert found
    others = [name for name in known.keys() | found.keys() if known.get(name) != found.get(name)]
    how = f"If that is wanted: python -m tests.support.facts. What there is now: the same with --show {topic}."
    return [f"What is said of {name!r} is not as it was. {how}" for name in sorted(others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="TOPIC", choices=TOPICS, help="print the facts of one, write nothing")
    shown = parser.parse_args().show
    if shown:
        for name, value in import_module(TOPICS[shown]).facts():
            print(name, *_lines(value), sep="\n    ")
        return
    topics = {topic: _digests(import_module(module).facts()) for topic, module in TOPICS.items()}
    RECORD.write_text(json.dumps(topics, indent=0) + "\n")


def _digests(facts: Iterator[tuple[str, Any]]) -> dict[str, str]:
    return {name: digest(plain(value)) for name, value in facts}


def _lines(value: Any) -> list[str]:
    return [f"{name}: {plain(each)}" for name, each in value.items()] if isinstance(value, dict) else [plain(value)]


if __name__ == "__main__":
    main()
