"""How many tokens a tile holds."""

from __future__ import annotations

from longspan.plan.shapes import ModelShape

STEP_TOKENS = 256
"""Shards that are a multiple of this count as chosen on purpose, and get a tile size of their own."""

SMALLEST_COMPILED_TOKENS = 1024
"""Shorter tiles run as they are: compiling them gains little, and lengths that small come in all sizes."""

LOGIT_TILE_ELEMENTS = 1 << 28
"""Elements of the logits of one tile of the loss: 1 GiB of float32."""

FIRST_LOGIT_TILE_TOKENS = 512
"""How wide a token is shows only after the first tile of the loss."""

KEY_BLOCK_TOKENS = 1 << 19
"""Keys of one kernel call: what kernels need besides their operands, above all in backward, grows with them."""

SMALLEST_OVERLAPPED_TOKENS = 8192
"""Shards are divided for the sake of overlap into tiles of at least so many tokens."""

_WIDE = 16_384


def largest_tile(shape: ModelShape) -> int:
    """Return the most tokens that a tile of a model should hold: enough to keep a device busy, and no more."""
    return 32_768 if max(layer.intermediate for layer in shape.layers) <= _WIDE else 16_384


def tile_tokens(shard_tokens: int, most: int) -> int:
    """Return the tokens of a tile, at most `most`, for a shard.

    Code is compiled for each size of tile, and what remains at the end of a shard runs uncompiled. A shard of a round
    length is one tile, or is divided evenly. Any other gets the largest power of two that leaves at most an eighth of
    it; so there are few sizes, however many lengths come.
    """
    if shard_tokens % STEP_TOKENS == 0:
        fewest = -(-shard_tokens // most)
        for count in range(fewest, 2 * fewest + 1):
            if shard_tokens // count < min(shard_tokens, SMALLEST_COMPILED_TOKENS):
                break
            if shard_tokens % count == 0 and (shard_tokens // count) % STEP_TOKENS == 0:
                return shard_tokens // count
    size = 1 << (min(shard_tokens, most).bit_length() - 1)
    best = size
    while size >= SMALLEST_COMPILED_TOKENS:
        if shard_tokens % size <= shard_tokens // 8:
            return size
        if shard_tokens % size < shard_tokens % best:
            best = size
        size //= 2
    return best
