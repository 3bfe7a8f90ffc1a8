"""The environments at fault as ids: `--env broken_registered:Hangs-v0 --trust-env`."""

import broken
import gymnasium

for name, kind in vars(broken).items():
    if isinstance(kind, type) and issubclass(kind, broken.Sound):
        gymnasium.register(f"{name}-v0", entry_point=kind)
