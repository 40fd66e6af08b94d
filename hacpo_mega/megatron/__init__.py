"""The only door to megatron.core: model, actor, optimizer, resharding."""

import hacpo_mega.megatron.model.installed  # noqa: F401  before any file here imports Megatron
