"""What the tests of the families over a latent cache share."""

from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape

H100 = GPUS["h100"]
NARROW = parse_shape("B=2,H=8,Hkv=1,Sq=1,Sk=3000,D=192,Dv=128,dtype=bf16,shared_kv=1")
