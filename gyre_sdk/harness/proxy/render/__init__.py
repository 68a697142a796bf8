"""Messages to tokens and back, for any model folder.

Text never becomes a special token: `<|im_end|>` in a user's message or a tool's output is encoded as plain text.
Tokens of earlier turns are never made again from text: a bridge keeps the ids that were sent and sampled.
"""

from gyre_sdk.harness.proxy.dialects.history import Ids
from gyre_sdk.harness.proxy.render.load import load_template
from gyre_sdk.harness.proxy.render.template import Template
from gyre_sdk.harness.proxy.render.tokenizer import TokenizerAdapter

__all__ = ["Ids", "Template", "TokenizerAdapter", "load_template"]
