"""placeholder until the Numba kernels are there"""

from lynxkv.codec.reference import decode_layer as decode_layer
from lynxkv.codec.reference import encode_layer as encode_layer
