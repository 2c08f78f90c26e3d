"""The table of axis letters. Every einsum string and shape comment in the project uses these.

| letter | axis |
|---|---|
| b | request of a dense batch |
| t | token of a sequence; s: a token that is attended to |
| r | row of a packed batch: one token position of one request |
| n | chunk of the chunked delta rule; i, j: positions inside a chunk |
| e | hidden size |
| f | MLP inner size, or the outputs of any projection |
| u | vocabulary |
| c | convolution channel (all q, then all k, then all v) |
| w | column of the convolution ring |
| h | GDN value head; g: key head or KV head; p: heads that share one g |
| k | GDN key dimension; v: GDN value dimension |
| d | attention head dimension |

In prose and shapes: H hidden size, V vocabulary, Hk / Hv GDN key / value heads, dk / dv their
dimensions, C convolution channels, K convolution width, W ring columns, A attention heads, G KV heads,
D head dimension, R rows.

Logical axes name what an array's dimension is for; `gdnjax.weights.sharding` maps them to a mesh.
"""

VOCAB = "vocab"
HIDDEN = "hidden"
MLP = "mlp"
# Rows of in_proj_qkv and channels of conv1d: all q, all k, all v. A plain slice of this axis would cut
# across the three blocks, so it has a name of its own.
GDN_QKV = "gdn_qkv"
GDN_VALUE = "gdn_value"  # Hv * dv, head-major
GDN_HEADS = "gdn_heads"  # Hv
GDN_VALUE_DIM = "gdn_value_dim"
CONV_TAP = "conv_tap"
QUERY_GATE = "query_gate"  # A * (q | gate), head-major
QUERY = "query"  # A * D, head-major
KEY_VALUE = "key_value"  # G * D, head-major
HEAD_DIM = "head_dim"
MTP_PAIR = "mtp_pair"  # embedding, then hidden
