"""Prompts for self-distillation: built-in templates, the user's own, or the target's own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specx.train.errors import TrainError
from vllm_specx.train.prompt_pools import POOLS
from vllm_specx.train.prompt_templates import FOLLOW_UPS, OWN_STARTS, TASKS, WEIGHTS

Message = dict[str, str]
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Prompt:
    """A conversation to be had with the target.

    messages: turns with role and content, the last one the user's; empty where the target itself
        writes the user's turn, which then begins with `start`.
    follow_up: the user's next turn after the target has answered; None ends there.
    """

    task: str
    messages: tuple[tuple[str, str], ...]
    follow_up: str | None = None
    start: str = ""

    @property
    def own(self) -> bool:
        """Whether the target writes the user's turn."""
        return not self.messages

    def chat(self) -> list[Message]:
        """The messages as chat templates take them."""
        return [{"role": role, "content": content} for role, content in self.messages]


class Composer:
    """Draws prompts from the templates; the same seed gives the same prompts."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self._composed: dict[str, Callable[[], str]] = {
            "snippet": self._snippet,
            "signature": self._signature,
            "passage": self._passage,
            "schema": self._schema,
            "ddl": self._ddl,
            "n1": lambda: str(self._random.randint(2, 9)),
            "n2": lambda: str(self._random.randint(10, 99)),
            "n3": lambda: str(
                self._random.choice((self._random.randint(100, 999), 120, 250, 500, 1000, 2400))
            ),
            "pct": lambda: str(
                self._random.choice((5, 10, 12, 15, 20, 25, 30, 35, 40, 50, 60, 75, 80))
            ),
            "hour": lambda: str(self._random.randint(7, 20)),
            "year": lambda: str(self._random.randint(1950, 2024)),
        }

    def draw(self, own_share: float, follow_up_share: float) -> Prompt:
        """One prompt; own_share of them are left to the target to write."""
        follow_up = None
        if self._random.random() < follow_up_share:
            follow_up = self.fill(self._random.choice(FOLLOW_UPS))
        if self._random.random() < own_share:
            return Prompt("own", (), follow_up, self._random.choice(OWN_STARTS))
        (task,) = self._random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        text = self.fill(self._random.choice(TASKS[task]))
        if task != "completion":
            text = text[:1].upper() + text[1:]
        return Prompt(task, (("user", text),), follow_up)

    def fill(self, template: str) -> str:
        """The template with every slot filled, slots inside fillers too."""

        def slot(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in self._composed:
                return self._composed[name]()
            if name in POOLS:
                return self.fill(self._random.choice(POOLS[name]))
            return match.group(0)

        return _SLOT.sub(slot, template)

    def _passage(self) -> str:
        count = self._random.randint(3, 7)
        return " ".join(self.fill("{sentence}") for _ in range(count))

    def _schema(self) -> str:
        kinds = ("string", "integer", "number", "boolean", "array")
        fields = self._random.sample(POOLS["field"], self._random.randint(2, 4))
        return json.dumps({field: self._random.choice(kinds) for field in fields})

    def _ddl(self) -> str:
        kinds = ("INTEGER", "TEXT", "REAL", "DATE", "VARCHAR(50)")
        columns = self._random.sample(POOLS["column"], self._random.randint(3, 6))
        lines = ",\n".join(f"  {column} {self._random.choice(kinds)}" for column in columns)
        return self.fill("CREATE TABLE {table} (\n") + lines + "\n);"

    def _signature(self) -> str:
        argument = self._random.choice(POOLS["arg"])
        name = self.fill("{fn_verb}_{fn_noun}")
        textual = argument in ("s", "text", "line")
        typed = self._random.random() < 0.6
        kind = (
            "str"
            if textual
            else self._random.choice(("list", "List[int]", "List[str]", "list[float]"))
        )
        extra = self._random.choice(("", "", "", ", n", ", k: int", ", target"))
        head = f"def {name}({argument}{': ' + kind if typed else ''}{extra}):"
        if typed and self._random.random() < 0.5:
            head = (
                head[:-1]
                + " -> "
                + self._random.choice(("int", "bool", "str", "list", "List[int]"))
                + ":"
            )
        if "List[" in head:
            head = "from typing import List\n\n\n" + head
        goal = self.fill(
            self._random.choice(
                (
                    "Return {aggregate} {condition}.",
                    "{programming_task}.",
                    "{fn_verb} the {fn_noun} {condition} and return {aggregate}.",
                )
            )
        ).strip()
        goal = goal[:1].upper() + goal[1:]
        examples = "".join(
            f"    >>> {name}({self._value(textual)})\n    {self._value(self._random.random() < 0.2)}\n"
            for _ in range(self._random.randint(0, 3))
        )
        quotes = self._random.choice(('"""', '"""', '"""', "'''"))
        return f"{head}\n    {quotes}{goal}\n{examples}    {quotes}\n"

    def _value(self, textual: bool) -> str:
        if textual:
            return repr(self.fill("{adjective} {animal}"))
        size = self._random.randint(0, 5)
        return str([self._random.randint(-9, 60) for _ in range(size)])

    def _snippet(self) -> str:
        make = self._random.choice((self._loop, self._comprehension, self._recursion, self._table))
        return make()

    def _test(self, variable: str) -> str:
        number = self._random.randint(2, 30)
        return self._random.choice(
            (
                f"{variable} % {number} == 0",
                f"{variable} > {number}",
                f"{variable} <= {number}",
                f"len(str({variable})) > 1",
                f"{variable} not in seen",
            )
        )

    def _loop(self) -> str:
        name, argument = self.fill("{fn_verb}_{fn_noun}"), self._random.choice(POOLS["arg"])
        seen = "    seen = set()\n"
        start, step, end = self._random.choice(
            (
                ("result = []", "result.append(item)", "return result"),
                ("total = 0", "total += item", "return total"),
                ("count = 0", "count += 1", "return count"),
                ("best = None", "best = item if best is None else max(best, item)", "return best"),
                ("counts = {}", "counts[item] = counts.get(item, 0) + 1", "return counts"),
            )
        )
        test = self._test("item")
        setup = seen if "seen" in test else ""
        add = "            seen.add(item)\n" if setup else ""
        return (
            f"def {name}({argument}):\n{setup}    {start}\n    for item in {argument}:\n"
            f"        if {test}:\n            {step}\n{add}    {end}"
        )

    def _comprehension(self) -> str:
        name, argument = self.fill("{fn_verb}_{fn_noun}"), self._random.choice(POOLS["arg"])
        expression = self._random.choice(
            ("x", "x * 2", "x ** 2", "str(x)", "x - 1", "(x, len(str(x)))")
        )
        test = self._test("x").replace("x not in seen", "x")
        call = self._random.choice(("sorted", "list", "set", "tuple"))
        return f"def {name}({argument}):\n    return {call}({expression} for x in {argument} if {test})"

    def _recursion(self) -> str:
        name = self.fill("{fn_verb}_{fn_noun}")
        base, step = self._random.choice(
            (
                ("1", f"n * {name}(n - 1)"),
                ("0", f"n + {name}(n - 1)"),
                ("n", f"{name}(n - 1) + {name}(n - 2)"),
                ("0", f"n % 10 + {name}(n // 10)"),
            )
        )
        return f"def {name}(n):\n    if n <= {self._random.randint(0, 2)}:\n        return {base}\n    return {step}"

    def _table(self) -> str:
        kind = self.fill("{object}").title().replace(" ", "")
        fields = self._random.sample(POOLS["field"], 3)
        lines = "\n".join(f"        self.{field} = {field}" for field in fields)
        return (
            f"class {kind}:\n    def __init__(self, {', '.join(fields)}):\n{lines}\n\n"
            f'    def __str__(self):\n        return f"{{self.{fields[0]}}} ({{self.{fields[1]}}})"'
        )


def built_in(seed: int | str, *, own_share: float, follow_up_share: float) -> Iterator[Prompt]:
    """Endless distinct prompts (own prompts may start alike)."""
    composer = Composer(seed)
    seen: set[int] = set()
    while True:
        prompt = composer.draw(own_share, follow_up_share)
        key = hash(prompt.messages)
        if prompt.own or key not in seen:
            seen.add(key)
            yield prompt


def from_files(files: Sequence[Path]) -> list[Prompt]:
    """Prompts of JSONL files: a line is a string, or a mapping with `prompt`, `messages` (an
    OpenAI request as served traffic logs keep them; a final assistant turn is dropped), or `turns`.

    Raises TrainError, one sentence that names file, line and what is missing.
    """
    prompts = [prompt for file in files for prompt in _of_file(file)]
    if not prompts:
        raise TrainError(f"there is no prompt in {', '.join(map(str, files))}.")
    return prompts


def _of_file(file: Path) -> Iterable[Prompt]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainError(f"the prompts in {file} cannot be read: {error}.") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield _of_line(line, f"{file} line {number}")


def _of_line(line: str, where: str) -> Prompt:
    try:
        data: Any = json.loads(line)
    except ValueError as error:
        raise TrainError(f"{where} is not valid JSON ({error}).") from None
    if isinstance(data, str):
        data = {"prompt": data}
    if isinstance(data, dict) and isinstance(data.get("request"), dict):
        data = data["request"]
    if not isinstance(data, dict):
        raise TrainError(f"{where} must be a string or a mapping with prompt, messages or turns.")
    if isinstance(data.get("prompt"), str) and data["prompt"].strip():
        return Prompt("user", (("user", data["prompt"]),))
    turns = data.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Prompt("user", (("user", turns[0]),), turns[1] if len(turns) > 1 else None)
    messages = data.get("messages")
    if isinstance(messages, list) and messages:
        try:
            chat = [(str(m["role"]), m["content"]) for m in messages]
        except (KeyError, TypeError):
            raise TrainError(f"{where}: each of messages needs role and content.") from None
        while chat and chat[-1][0] == "assistant":
            chat.pop()
        if chat and all(isinstance(content, str) for _, content in chat):
            return Prompt("user", tuple(chat))
    raise TrainError(f"{where} has no text in prompt, messages or turns.")
