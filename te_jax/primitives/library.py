"""Native modules: what is available. Placeholder interface, replaced by the native branch."""
import typing
class Status(typing.NamedTuple):
    available: bool
    reason: str
    path: str | None = None
def status(platform):
    import jax
    if platform == "cuda":
        try:
            jax.devices("cuda")
        except RuntimeError:
            return Status(True, "")
    return Status(False, "no native library")
def ensure_registered(platform):
    pass
