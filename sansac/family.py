"""The off-policy family: the class that each name of `config.algorithm` stands for."""

from __future__ import annotations

from sansac.algorithm import SAC
from sansac.config import ALGORITHM_NAMES, Config
from sansac.off_policy import OffPolicy
from sansac.sac_v import SACV
from sansac.td3 import TD3

ALGORITHMS: dict[str, type[OffPolicy]] = {
    "sac": SAC,
    "sac-v": SACV,
    "td3": TD3,
    "ddpg": TD3,  # no twin, no delay, no smoothing: configs/ddpg.yaml
    # SAC with another critic, which their presets choose.
    "tqc": SAC,
    "crossq": SAC,
    "droq": SAC,
    "redq": SAC,
}


def make_algorithm(
    config: Config, observation_size: int, action_size: int, device: str
) -> OffPolicy:
    return ALGORITHMS[config.algorithm](config, observation_size, action_size, device)


def register_algorithm(name: str, algorithm: type[OffPolicy]) -> None:
    """Make a class of your own a choice of `algorithm` (docs/architecture.md).

    Raises ValueError where the name is taken.
    """
    if name in ALGORITHMS:
        raise ValueError(f"{name!r} is taken: choose another name")
    ALGORITHMS[name] = algorithm
    ALGORITHM_NAMES.append(name)
