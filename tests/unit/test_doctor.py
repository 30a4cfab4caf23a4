"""The doctor: pairings that work, pairings that cannot, and what it could not look at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.twins import qwen_pair, tokenizer, twin
from vllm_specx import recipes
from vllm_specx.cli import main
from vllm_specx.doctor import Finding, check, errors, machine
from vllm_specx.plan.facts import read_facts
from vllm_specx.plan.parallel import possible_ranks
from vllm_specx.recipes import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
EAGLE3 = str(RECIPES / "heads" / "smollm2-135m-eagle3")
SMOLLM = "embedded:smollm2-135m-instruct"
WORDS = [f"w{i}" for i in range(90)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Target and draft of one tokenizer with other padding, the draft's 7 heads undivided by 2."""
    return qwen_pair(tmp_path_factory.mktemp("pair"))


def look(
    model: str, method: str | None, draft: str | None = None, *, serve: Any = None, **keys: Any
) -> list[Finding]:
    speculation = None
    if method is not None:
        speculation = {"method": method, "num_speculative_tokens": 4, **keys}
        if draft is not None:
            speculation["model"] = draft
    made = {"model": model, "speculation": speculation, "serve": serve or {}}
    return check(Recipe.model_validate(made))


def said(findings: list[Finding], topic: str) -> Finding:
    (found,) = [finding for finding in findings if finding.topic == topic]
    return found


def test_a_padded_pair_works_and_says_why(pair: tuple[str, str]) -> None:
    found = look(pair[0], "specx:draft_model", pair[1], serve={"tensor-parallel-size": 2})
    assert errors(found) == []
    assert said(found, "tokenizer").severity == "ok"
    assert "1001 tokens below id 1001 are the same" in said(found, "tokenizer").what
    padded = said(found, "vocabulary")
    assert padded.severity == "note"
    assert "1024 rows of vocabulary and the draft 1008" in padded.what
    assert "need not: it is whole on every rank" in said(found, "draft ranks").what
    assert "2 layers" in said(found, "checkpoint").what


def test_what_stock_draft_model_does_with_it(pair: tuple[str, str]) -> None:
    alone = look(pair[0], "draft_model", pair[1])
    assert said(alone, "vocabulary").severity == "error"
    assert "specx:draft_model" in said(alone, "vocabulary").fix
    beside = look(pair[0], "draft_model", pair[1], specx={})
    assert said(beside, "vocabulary").severity == "note"
    swapped = look(pair[1], "draft_model", pair[0], specx={})
    assert "as many or fewer" in said(swapped, "vocabulary").what
    two = look(pair[0], "draft_model", pair[1], specx={}, serve={"tensor-parallel-size": 2})
    assert said(two, "draft ranks").severity == "error"
    assert "7 attention heads" in said(two, "draft ranks").what
    one = look(
        pair[0],
        "draft_model",
        pair[1],
        specx={},
        draft_tensor_parallel_size=1,
        serve={"tensor-parallel-size": 2},
    )
    assert "needs them equal" in said(one, "draft ranks").what


@pytest.mark.parametrize(
    ("change", "topic", "severity", "what"),
    [
        ({"words": ["other", *WORDS[1:]]}, "tokenizer", "error", "token 0, the first of 1"),
        ({"added": ("<a>", "<c>")}, "special tokens", "note", "'<b>'"),
        ({"template": "{{ messages }}"}, "chat template", "note", "the chat templates differ"),
        ({"merges": [["a", "b"]]}, "merges", "warning", "other cuts of the same text"),
    ],
)
def test_tokenizers_that_differ(
    tmp_path: Path, change: dict[str, Any], topic: str, severity: str, what: str
) -> None:
    paths = [twin(tmp_path / name, "llama") for name in ("target", "draft")]
    tokenizer(paths[0], WORDS, ("<a>", "<b>"))
    tokenizer(paths[1], change.get("words", WORDS), change.get("added", ("<a>", "<b>")))
    if "template" in change:
        (Path(paths[1]) / "chat_template.jinja").write_text(change["template"])
    if "merges" in change:
        file = Path(paths[1]) / "tokenizer.json"
        data = json.loads(file.read_text())
        pieces = {"a": 0, "b": 1, "ab": 2}
        for folder, merges in zip(paths, ([], change["merges"]), strict=True):
            data["model"] = {"type": "BPE", "vocab": pieces, "merges": merges}
            data["added_tokens"] = []
            (Path(folder) / "tokenizer.json").write_text(json.dumps(data))
    found = said(look(paths[0], "specx:draft_model", paths[1]), topic)
    assert found.severity == severity
    assert what in found.what


@pytest.mark.parametrize(
    ("arguments", "keys", "topic", "what", "fix"),
    [
        (
            (SMOLLM, "specx:eagle", EAGLE3),
            {"serve": {"tensor-parallel-size": 2}},
            "tensor parallelism",
            "9 attention heads and its 3 key-value heads do not divide",
            "one of 1, 3",
        ),
        (
            (SMOLLM, None),
            {"serve": {"max-model-len": 9000}},
            "context",
            "max-model-len is 9000, and embedded:smollm2-135m-instruct is made for 8192",
            "lower it",
        ),
        (
            ("Qwen/Qwen2.5-7B-Instruct", "specx:eagle", EAGLE3),
            {},
            "checkpoint",
            "was made for a target with",
            "use heads that were trained for it",
        ),
        (
            (SMOLLM, "specx:medusa", EAGLE3),
            {},
            "checkpoint",
            "holds an EAGLE draft, not Medusa heads",
            "write method 'specx:eagle'",
        ),
        (
            (SMOLLM, "specx:eagle", "heads/no-such"),
            {},
            "checkpoint",
            "the weights of heads/no-such",
            "",
        ),
        (
            (SMOLLM, "specx:eagle", "../heads/no-such"),
            {},
            "checkpoint",
            "there is no draft '../heads/no-such'",
            "train the draft first",
        ),
        (
            (SMOLLM, "specx:eagle", EAGLE3),
            {"serve": {"pipeline-parallel-size": 2}},
            "pipeline",
            "needs all of the target in one stage",
            "tensor parallelism",
        ),
        (
            ("Qwen/Qwen2.5-7B-Instruct", "specx:draft_model", "meta-llama/Llama-3.2-1B-Instruct"),
            {},
            "tokenizer",
            "has the tokenizer of llama3",
            "the target's family",
        ),
        (
            ("Qwen/Qwen2.5-0.5B-Instruct", "specx:draft_model", "Qwen/Qwen2.5-1.5B-Instruct"),
            {},
            "draft",
            "no fewer than the target's 0.49",
            "a smaller model",
        ),
        (
            (
                "meta-llama/Llama-3.1-8B-Instruct",
                "specx:eagle",
                "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
            ),
            {},
            "checkpoint",
            "was made for a target with hidden size 8192",
            "trained for this target",
        ),
    ],
)
def test_pairings_that_cannot_work(
    arguments: tuple[Any, ...], keys: dict[str, Any], topic: str, what: str, fix: str
) -> None:
    found = look(*arguments, **keys)
    if fix:
        wrong = [finding for finding in errors(found) if finding.topic == topic]
    else:
        wrong = [finding for finding in found if finding.topic == topic]
        assert wrong[0].severity == "unchecked", "it has the form of a hub name"
    assert len(wrong) == 1
    assert what in wrong[0].what
    assert fix in wrong[0].fix
    assert wrong[0].sentence.count("\n") == 0
    assert wrong[0].sentence.endswith(".")


def test_files_that_are_damaged(tmp_path: Path, pair: tuple[str, str]) -> None:
    heads = tmp_path / "heads"
    shutil.copytree(EAGLE3, heads)
    whole = (heads / "model.safetensors").read_bytes()
    (heads / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (wrong,) = errors(look(SMOLLM, "specx:eagle", str(heads)))
    assert "copy it again" in wrong.sentence
    draft = tmp_path / "draft"
    shutil.copytree(pair[1], draft)
    config = json.loads((draft / "config.json").read_text())
    for change, what in (
        ({"num_hidden_layers": 3}, "no 'model.layers.2."),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantized"),
        ({"model_type": "gpt2"}, "model type 'gpt2'"),
    ):
        (draft / "config.json").write_text(json.dumps({**config, **change}))
        found = errors(look(pair[0], "specx:draft_model", str(draft)))
        assert any(what in finding.what for finding in found)


def test_quantized_groups_that_no_rank_can_split(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064}
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads | awq))
    assert errors(look(str(tmp_path), None)) == []
    (wrong,) = errors(look(str(tmp_path), None, serve={"tensor-parallel-size": 8}))
    assert "parts of 3696, which its groups of 128 do not divide" in wrong.what


def test_a_dear_draft_is_a_warning() -> None:
    serve = {"tensor-parallel-size": 4, "max-model-len": 8192}
    target, draft = "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"
    found = [f for f in look(target, "specx:draft_model", draft, serve=serve) if f.topic == "draft"]
    assert [finding.severity for finding in found] == ["ok", "warning"]
    assert "43% of what a plain step reads" in found[1].what
    assert "vLLM's draft_model" in found[1].fix
    stock = look(target, "draft_model", draft, serve=serve)
    assert [f.severity for f in stock if f.topic == "draft"] == ["ok"]


def test_a_draft_with_less_context_is_a_warning() -> None:
    target, draft = "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    found = said(look(target, "specx:eagle", draft), "draft context")
    assert found.severity == "warning"
    assert "texts of 2048 tokens" in found.what
    long = look(target, "specx:draft_model", "meta-llama/Meta-Llama-3-8B-Instruct")
    assert "reads 8192 tokens" in said(long, "draft context").what


def test_what_is_not_here_is_said() -> None:
    found = look("no/such-model", "specx:draft_model", "no/such-draft")
    assert errors(found) == []
    unchecked = [finding.topic for finding in found if finding.severity == "unchecked"]
    assert unchecked == ["target", "draft", "checkpoint"]


def test_ranks_that_are_possible() -> None:
    assert possible_ranks(read_facts(SMOLLM)) == [1, 3]
    assert possible_ranks(read_facts("Qwen/Qwen2.5-72B-Instruct")) == [1, 2, 4, 8, 16]
    assert possible_ranks(read_facts("Qwen/Qwen2.5-7B-Instruct")) == [1, 2, 4]


@pytest.mark.parametrize("name", recipes.names())
def test_recipes_that_come_along_can_work(name: str) -> None:
    chosen = recipes.load(recipes.find(name))
    for count in sorted({chosen.tensor_parallel_size, *chosen.gpus}):
        wrong = errors(check(chosen.on_gpus(count)))
        # Heads that are to be trained first are not here.
        assert [finding for finding in wrong if "there is no draft" not in finding.what] == []


def test_the_machine() -> None:
    found = machine.check({"LD_PRELOAD": "/x/libiomp5.so:/x/libtcmalloc.so.4"})
    assert errors(found) == []
    topics = {finding.topic: finding.severity for finding in found}
    assert topics["vLLM"] == "ok"
    assert topics["plugin"] == "ok"
    (wrong,) = errors(machine.check({"VLLM_PLUGINS": "other"}))
    assert "VLLM_PLUGINS is 'other'" in wrong.what


def test_bad_input_ends_in_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    listed = tmp_path / "list.yaml"
    listed.write_text("- a\n")
    for arguments in (["no-such"], [str(listed)], ["smollm2-135m", "--gpus", "77"]):
        assert main(["doctor", *arguments]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


STRANGE = (None, "x", -1, 0, 1.5, [], {}, True, 10**40, [["a"]], {"a": {}})


@pytest.mark.parametrize("source", [EAGLE3, str(RECIPES / "heads" / "smollm2-135m-hydra")])
def test_whatever_a_drafts_config_says_nothing_is_raised(tmp_path: Path, source: str) -> None:
    shutil.copytree(source, tmp_path / "heads")
    file = tmp_path / "heads" / "config.json"
    config = json.loads(file.read_text())
    asked = (
        "hidden_size",
        "num_heads",
        "specx",
        "eagle_config",
        "rope_parameters",
        "dtype",
        "model_type",
    )
    for key in (*asked, "draft_vocab_size", "target_hidden_size", "quantization_config", "model"):
        for value in STRANGE:
            file.write_text(json.dumps({**config, key: value}))
            found = look(SMOLLM, "specx:auto", str(tmp_path / "heads"))
            assert all(finding.sentence for finding in found)


def test_whatever_a_targets_config_says_nothing_is_raised(tmp_path: Path) -> None:
    config = json.loads(Path(twin(tmp_path, "qwen2"), "config.json").read_text())
    for key in [*config, "quantization_config", "text_config", "num_experts"]:
        for value in STRANGE:
            (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
            for draft in (EAGLE3, str(tmp_path)):
                assert look(str(tmp_path), "specx:auto", draft)
