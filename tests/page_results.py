"""Results as `to_json` writes them, from a hand-made evaluation; one of its texts is hostile."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from draftsmith.eval.prompts import Prompt
from draftsmith.eval.report_json import to_json
from draftsmith.eval.results import (
    EvaluationResult,
    EvaluationSettings,
    PromptResult,
    TurnResult,
    describe_answer,
)
from draftsmith.inference.plain import Divergence
from draftsmith.inference.records import Generation, RoundRecord, TokenOrigin

MAX_DEPTH = 5
HOSTILE_PROMPT = "<script>alert(1)</script> & \"quotes\" 'n' </title></div>"
HOSTILE_TOKENS = [
    "<script>alert('model')</script>",
    "</script>",
    '"><img src=x onerror=alert(2)>',
    "&lt;b&gt;",
    " ]]> -->",
    "\u202egnp.exe",
    "\x00",
    "\ud83d",
    "",
    " na\u00efve",
    "\u2028",
    "\t",
    "   ",
    "\n\n",
    "<|im_end|>",
]
CODE = (
    "Here is a function that does it:\n\n```python\ndef running_mean(values):\n"
    "    total = 0.0\n    means = []\n    for count, value in enumerate(values, start=1):\n"
    "        total += value\n        means.append(total / count)\n    return means\n```\n\n"
    "It adds each value once, so the cost grows with the number of values."
)
TEXTS = {
    ("chat-1", "chat", 0.55): [
        (
            "How do I get better at small talk with strangers?",
            "Small talk is a skill, and like any skill it grows with practice. Begin with what "
            "you share: the place, the weather, the queue you are both standing in. Ask one open "
            "question, listen to the answer, and say something about yourself in return.",
        ),
        (
            "And if there is an awkward silence?",
            "Let it be. A pause of two or three seconds feels long only to you. If it lasts, "
            "go back to something they said earlier and ask about it.",
        ),
    ],
    ("code-1", "code", 0.86): [("Write a running mean in Python.", CODE)],
    ("maths-1", "maths", 0.7): [
        (
            "A train covers 180 km in 2.5 hours. How fast is it?",
            "Speed is distance divided by time: 180 km / 2.5 h = 72 km/h. The train travels at "
            "72 km/h on average.",
        )
    ],
    ("loop-1", "maths", 0.97): [
        ("Count slowly.", "One, two, " + "and again, " * 30),
    ],
}


GIVEN: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "system", "content": "You are <b>brief</b>."},),
    (),
)


@dataclass
class Drawn:
    """One answer and what it answers."""

    turn: TurnResult
    prompt: str


def pieces(text: str) -> list[str]:
    """About what a subword tokenizer makes of it."""
    words = re.findall(r" ?[A-Za-z]+| ?\d| {2,}|\n+|[^A-Za-z\d]", text)
    return [part for word in words for part in ([word[:7], word[7:]] if len(word) > 8 else [word])]


def draw_answer(prompt: str, texts: list[str], rate: float, source: random.Random) -> Drawn:
    """Rounds of a chain of up to MAX_DEPTH drafted tokens, each kept with probability `rate`."""
    origins = [TokenOrigin(0, None, 0.62)]
    records = []
    while len(origins) < len(texts):
        room = len(texts) - len(origins)
        accepted = next((i for i in range(MAX_DEPTH) if source.random() > rate), MAX_DEPTH)
        emitted = min(accepted + 1, room)
        records.append(RoundRecord(MAX_DEPTH, MAX_DEPTH, accepted, emitted, 0.021, 0.034, 0.002))
        for depth in range(1, emitted + 1):
            target_prob = source.uniform(0.4, 1.0)
            if depth <= accepted:
                draft_prob = min(1.0, target_prob * source.uniform(0.6, 1.05))
                origins.append(TokenOrigin(depth, draft_prob, target_prob))
            else:
                origins.append(TokenOrigin(0, None, target_prob / 2))
    # An id per distinct text, so that a loop of texts is a loop of ids.
    known = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    ids = [known[text] for text in texts]
    seconds = 0.08 + sum(r.draft_seconds + r.verify_seconds + r.other_seconds for r in records)
    generation = Generation(ids, "stop", records, seconds, 0.08, origins)
    plain = Generation(ids, "stop", [], 0.08 + 0.032 * (len(ids) - 1), 0.08)
    turn = describe_answer([5, 6, 7], generation, "".join(texts), token_texts=texts)
    turn.plain, turn.plain_seconds, turn.checked = plain, plain.seconds, True
    return Drawn(turn, prompt)


def make_results(*, status: str = "equal", extra: int = 0) -> dict[str, Any]:
    """An evaluation in the JSON form.

    Args:
        status: losslessness: "equal", "near_ties" or "different".
        extra: further prompts, with answers of about 300 tokens.
    """
    source = random.Random(0)
    conversations: list[tuple[str, str, list[Drawn]]] = []
    for (name, category, rate), turns in TEXTS.items():
        drawn = [draw_answer(said, pieces(answer), rate, source) for said, answer in turns]
        conversations.append((name, category, drawn))
    hostile = draw_answer(HOSTILE_PROMPT, HOSTILE_TOKENS, 0.8, source)
    conversations.append(("<i>hostile</i>", 'odd "<category>" a/b~c', [hostile]))
    for number in range(extra):
        texts = (pieces(CODE) * 4)[:300]
        conversations.append(
            (f"extra-{number}", "code", [draw_answer("More.", texts, 0.8, source)])
        )
    if status != "equal":
        conversations[1][2][0].turn.divergence = Divergence(9, 4, 5, 0.01, status == "near_ties")
    result = EvaluationResult(
        settings=EvaluationSettings(max_new_tokens=160),
        target="SmolLM2-135M-Instruct",
        draft="runs/quickstart/train/best",
        prompts=[
            PromptResult(
                Prompt(
                    name,
                    category,
                    tuple(one.prompt for one in drawn),
                    given=GIVEN if len(drawn) == 2 else (),
                ),
                [one.turn for one in drawn],
            )
            for name, category, drawn in conversations
        ],
        environment={
            "versions": {"draftsmith": "0.1.0", "torch": "2.13.0"},
            "dtype": "float32",
            "device": "cpu",
            "machine": "x86_64",
            "threads": 2,
            "processes": 1,
        },
        warm_up="8 tokens of the first prompt both ways, not counted",
        template="chat template of the tokenizer",
    )
    return to_json(result)


def value_at_pointer(document: Any, pointer: str) -> Any:
    """RFC 6901, written anew: the tests must not read the page with the page's own code."""
    found = document
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def is_shown_as(value: Any, text: str) -> bool:
    """Whether a text is a value, rounded to the digits that it has."""
    if isinstance(value, str):
        return value == text
    scale = 100.0 if text.endswith("%") else 1.0
    digits = text.rstrip("%x")
    decimals = len(digits.partition(".")[2])
    return abs(float(digits) - value * scale) <= 0.5 * 10.0**-decimals * (1 + 1e-9)
