"""The only door to megatron.core: model, actor, optimizer, resharding."""

import hacpo_mega.megatron.installed  # noqa: F401  before any file here imports Megatron
