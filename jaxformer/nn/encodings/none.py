"""No position at all: without a mask that orders the slots, the model then sees a set."""

from jaxformer.nn.encodings import Encoding

ENCODING = Encoding()
