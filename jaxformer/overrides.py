"""The name of `jaxformer.config.overrides` before version 0.2, for recipes and scripts written for it."""

import sys
import warnings

from jaxformer.config import overrides

warnings.warn(
    "jaxformer.overrides: got the old name, expected jaxformer.config.overrides; it goes in version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
sys.modules[__name__] = overrides
