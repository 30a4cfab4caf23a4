"""The one flag, and every way to get it wrong."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_specx.config import ConfigError, DraftModelConfig, EagleConfig, parse
from vllm_specx.engine.pools import SALT_KEY, pool_of
from vllm_specx.engine.translate import translate

METHODS = frozenset({"ngram", "eagle", "draft_model", "custom_class"})
KEYS = frozenset(
    {
        "method",
        "model",
        "num_speculative_tokens",
        "prompt_lookup_max",
        "draft_tensor_parallel_size",
    }
)


def call(speculative: Any, additional: Any = None) -> tuple[Any, Any]:
    return translate(speculative, additional, METHODS, KEYS)


def test_without_specx_nothing_changes() -> None:
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}, {"model": "a/b"}):
        assert call(config, {"other": 1}) == (config, {"other": 1})


def test_the_short_form() -> None:
    given = {"method": "specx:ngram", "num-speculative-tokens": 8, "pool": "off"}
    speculative, additional = call(given)
    assert speculative == {
        "method": "custom_class",
        "model": "vllm_specx.NgramProposer",
        "num_speculative_tokens": 8,
    }
    assert additional == {"specx": {"proposer": "ngram", "pool": "off"}}
    assert given == {"method": "specx:ngram", "num-speculative-tokens": 8, "pool": "off"}
    assert call(speculative, additional) == (speculative, additional), (
        "a second time changes nothing"
    )


def test_the_long_form_and_stock_methods() -> None:
    speculative, additional = call(
        {"model": "vllm_specx.NgramProposer"}, {"specx": {"pool": "off"}}
    )
    assert speculative["method"] == "custom_class"
    assert speculative["num_speculative_tokens"] == 32
    assert additional == {"specx": {"proposer": "ngram", "pool": "off"}}
    speculative, additional = call({"method": "ngram", "specx": {}})
    assert speculative == {"method": "ngram"}
    assert additional == {"specx": {"proposer": "stock"}}


@pytest.mark.parametrize("method", ["medusa", "specx:medusa"])
def test_medusa_is_ours_where_vllm_has_none(method: str) -> None:
    speculative, additional = call({"method": method, "model": "some/heads"})
    assert speculative == {
        "method": "custom_class",
        "model": "vllm_specx.MedusaProposer",
        "num_speculative_tokens": 4,
    }
    assert additional == {"specx": {"proposer": "medusa", "heads": "some/heads"}}


@pytest.mark.parametrize("method", ["specx:eagle", "specx:eagle3"])
def test_eagle_by_both_names(method: str) -> None:
    speculative, additional = call({"method": method, "model": "some/draft", "vocab": 100})
    assert speculative == {
        "method": "custom_class",
        "model": "vllm_specx.EagleProposer",
        "num_speculative_tokens": 4,
    }
    assert additional == {"specx": {"proposer": "eagle", "heads": "some/draft", "vocab": 100}}
    assert call(speculative, additional) == (speculative, additional)
    own = {"proposer": method.removeprefix("specx:"), "heads": "x", "aux_layers": [2, 5]}
    _, additional = call({"model": "vllm_specx.EagleProposer"}, {"specx": own})
    assert additional["specx"]["proposer"] == "eagle"
    assert parse(own) == EagleConfig(heads="x", aux_layers=(2, 5))


def test_a_draft_model() -> None:
    given = {"method": "specx:draft_model", "model": "some/model", "max-model-len": 4096}
    speculative, additional = call(given)
    assert speculative == {
        "method": "custom_class",
        "model": "vllm_specx.DraftModelProposer",
        "num_speculative_tokens": 5,
    }
    own = {"proposer": "draft_model", "draft": "some/model", "max_model_len": 4096}
    assert additional == {"specx": own}
    assert call(speculative, additional) == (speculative, additional)
    assert parse(own) == DraftModelConfig(draft="some/model", max_model_len=4096)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_vllms_own_eagle_stays(method: str) -> None:
    config = {"method": method, "model": "some/draft", "num_speculative_tokens": 3}
    assert call(config) == (config, {})


@pytest.mark.parametrize(
    ("speculative", "additional", "words"),
    [
        ({"method": "specx:ngrm"}, None, "did you mean 'specx:ngram'"),
        ({"method": "specx:draft_model"}, None, "'draft' in specx is missing; add it, or 'model'"),
        ({"method": "specx:draft_modl", "model": "x"}, None, "did you mean 'specx:draft_model'"),
        ({"method": "specx:draft_model", "model": "x", "draft": "y"}, None, "given twice"),
        ({"method": "specx:draft_model", "model": "x", "dtype": "int8"}, None, "'dtype' in specx"),
        ({"method": "specx:draft_model", "model": "x", "read_tokens": 1}, None, "'read_tokens'"),
        (
            {"method": "specx:draft_model", "model": "x", "draft_tensor_parallel_size": 1},
            None,
            "key of vLLM's other methods",
        ),
        ({"method": "specx:egle"}, None, "did you mean 'specx:eagle'"),
        ({"method": "specx:eagle"}, None, "'heads' in specx is missing"),
        ({"method": "specx:eagle3", "model": "x", "nodes": 8}, None, "to method 'specx:eagle3'"),
        ({"method": "specx:eagle", "heads": "x", "aux_layers": [5, 2]}, None, "ascending order"),
        ({"method": "specx:eagle", "heads": "x", "aux_layers": []}, None, "ascending order"),
        ({"method": "specx:eagle", "heads": "x", "aux_layers": [2, -5]}, None, "'aux_layers.1'"),
        (
            {"method": "specx:eagle", "heads": "x", "cache_tokens": 3},
            None,
            "'cache_tokens' in specx is 3",
        ),
        ({"method": "specx:eagle", "heads": "x", "vocab": 0}, None, "'vocab' in specx is 0"),
        ({"method": "specx:eagle", "heads": ""}, None, "'heads' in specx is ''"),
        ({"method": "specx:medusa"}, None, "'heads' in specx is missing"),
        (
            {"method": "specx:medusa", "heads": "x", "tree": {"nodes": 1}},
            None,
            "'tree.nodes' in specx is 1",
        ),
        ({"method": "specx:stock"}, None, "cannot be chosen"),
        ({"method": "specx:ngram", "prompt_lookup_max": 3}, None, "key of vLLM's other methods"),
        ({"method": "specx:ngram", "pol": 3}, None, "did you mean 'pool'"),
        ({"method": "specx:ngram", "pool": {"max_token": 3}}, None, "unknown key 'pool.max_token'"),
        ({"method": "specx:ngram", "pool": 7}, None, "'pool' in specx is 7"),
        ({"method": "specx:ngram", "tree": {"node": 3}}, None, "unknown key 'tree.node'"),
        ({"method": "specx:ngram", "lookahead": "on"}, None, "needs draft trees; add 'tree'"),
        (
            {"method": "specx:ngram", "tree": {}, "lookahead": {"windows": 3}},
            None,
            "unknown key 'lookahead.windows' in specx; did you mean 'window'",
        ),
        (
            {"method": "specx:ngram", "tree": {}, "lookahead": "maybe"},
            None,
            "must be 'on', 'off' or a mapping",
        ),
        (
            {"method": "specx:ngram", "tree": {}, "lookahead": {"window": 20, "ngram": 8}},
            None,
            "139 rows beside the 32 of tree.nodes, and there are 128",
        ),
        (
            {
                "method": "specx:ngram",
                "tree": {},
                "lookahead": "on",
                "num_speculative_tokens": 32,
            },
            None,
            "'num_speculative_tokens' is 32, and tree.nodes and the rows of 'lookahead' are 59",
        ),
        (
            {"method": "specx:medusa", "heads": "x", "tree": {}, "lookahead": "on"},
            None,
            "'lookahead' is unknown to method 'specx:medusa'",
        ),
        ({"method": "specx:ngram", "num_speculative_tokens": 0}, None, "from 1 to 128"),
        ({"method": "specx:ngram", "num_speculative_tokens": -3}, None, "is -3"),
        ({"method": "specx:ngram", "num_speculative_tokens": 129}, None, "is 129"),
        ({"method": "specx:ngram", "num_speculative_tokens": "8"}, None, "is '8'"),
        ({"method": "specx:ngram", "num_speculative_tokens": True}, None, "is True"),
        ({"method": "specx:ngram", "specx": {}}, None, "is not needed beside"),
        ({"method": "specx:ngram", "pool": "off"}, {"specx": {"pool": "on"}}, "keep one"),
        ({"method": "specx:ngram"}, {"specx": [1]}, "must be a mapping"),
        (
            {"method": "eagle", "model": "vllm_specx.NgramProposer"},
            None,
            "needs method 'custom_class'",
        ),
        ({"method": "ngram", "specx": {"pol": 1}}, None, "unknown key 'pol'"),
        ({"method": "ngram", "specx": {}}, {"specx": {}}, "keep one"),
        ({"method": "ngram", "specx": {"proposer": "ngram"}}, None, "specx:ngram"),
        ({"method": "ngram", "specx": 3}, None, "must be a mapping"),
        ({"method": "ngrm", "specx": {}}, None, "unknown method 'ngrm'; did you mean 'ngram'"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(
    speculative: Any, additional: Any, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        call(speculative, additional)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_pools() -> None:
    assert pool_of(None) == pool_of({}) == "default"
    assert pool_of({"specx_pool": "off"}) is None
    assert pool_of({"specx_pool": 3}) is None
    assert pool_of({"specx_pool": "a"}) == "a"
    salted = pool_of({"specx_pool": "a", SALT_KEY: "s"})
    assert salted not in (None, "a")
    assert salted != pool_of({"specx_pool": "a", SALT_KEY: "t"})
