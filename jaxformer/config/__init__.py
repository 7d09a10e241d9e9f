"""A run's config: typed fields, the editable form that recipes and the command line change, and the checks.

`schema.py` declares every field, with the allowed values of `constraints.py` in its type. `overrides.py` is the
editable form, `recipes.py` runs recipes, `frozen.py` converts to and from `Config` and JSON, `checks/` compares fields
with each other, and `comparison.py` compares configs.
"""

from jaxformer.config.schema import (
    AXES,
    AttentionConfig,
    CheckpointConfig,
    Config,
    ConvConfig,
    DataConfig,
    DcnConfig,
    DecodeConfig,
    EmbedConfig,
    EncodingConfig,
    EvaluateConfig,
    FeedForwardConfig,
    HeadConfig,
    InitConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    NormConfig,
    OptimizerConfig,
    PermutationConfig,
    RecurrentConfig,
    RopeScalingConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.errors import ConfigError, StorageError

__all__ = [
    "AXES",
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "ConvConfig",
    "DataConfig",
    "DcnConfig",
    "DecodeConfig",
    "EmbedConfig",
    "EncodingConfig",
    "EvaluateConfig",
    "FeedForwardConfig",
    "HeadConfig",
    "InitConfig",
    "MeshConfig",
    "MoEConfig",
    "ModelConfig",
    "NormConfig",
    "OptimizerConfig",
    "PermutationConfig",
    "RecurrentConfig",
    "RopeScalingConfig",
    "ScheduleConfig",
    "StackConfig",
    "StorageError",
    "TaskConfig",
    "TokenizerConfig",
    "TrainConfig",
]
