"""What a list of ops means, without Flax variables: places and names, the ways of extra values, runs."""

from te_jax.chain.extras import CALL as CALL
from te_jax.chain.extras import Value as Value
from te_jax.chain.parts import Chain as Chain
from te_jax.chain.parts import ForeignPart as ForeignPart
from te_jax.chain.parts import RunPart as RunPart
from te_jax.chain.parts import read_chain as read_chain
from te_jax.chain.places import Foreign as Foreign
from te_jax.chain.places import Place as Place
