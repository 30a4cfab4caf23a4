"""What a request shares: `specx_pool` in its extra_args names it, and never across cache_salt.

The time that accepted drafts save could tell one tenant what another one wrote, hence pools.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from vllm_specx.messages import shown, warn_of

POOL_KEY = "specx_pool"
SALT_KEY = "specx_cache_salt_digest"
DEFAULT_POOL = "default"
OFF = "off"


def stamp_salt(request: Any) -> None:
    """Put a digest of `request.cache_salt` where the worker sees it; a client's own is dropped."""
    params = request.sampling_params
    if params is None:
        return
    extra = params.extra_args or {}
    if request.cache_salt:
        digest = hashlib.blake2b(str(request.cache_salt).encode(), digest_size=16).hexdigest()
        params.extra_args = {**extra, SALT_KEY: digest}
    elif SALT_KEY in extra:
        params.extra_args = {key: value for key, value in extra.items() if key != SALT_KEY}


def pool_of(extra_args: Mapping[str, Any] | None) -> str | None:
    """The pool's name for a request's extra_args; None: it shares nothing."""
    extra = extra_args or {}
    name = extra.get(POOL_KEY, DEFAULT_POOL)
    if not isinstance(name, str):
        warn_of(f"{POOL_KEY} is {shown(name)}; it must be a name, or 'off'. Nothing is shared.")
        return None
    if name == OFF:
        return None
    salt = extra.get(SALT_KEY)
    return name if salt is None else f"{name}\0{salt}"


def state_key(pool: str | None, state: Any) -> str | None:
    """Whose hidden states a request may use: of requests in its pool that were read with the same
    adapter and the same images; None: nobody's.

    state: vLLM's CachedRequestState. What counts is what counts for vLLM's prefix cache
    (v1/core/kv_cache_utils.py: generate_block_hash_extra_keys), but images wherever they are.
    """
    if pool is None:
        return None
    lora = state.lora_request
    adapter = None if lora is None else (lora.lora_name, lora.lora_path)
    images = [(f.identifier, f.mm_position.offset) for f in state.mm_features]
    return f"{pool}\0{adapter!r}{images!r}" if adapter or images else pool
