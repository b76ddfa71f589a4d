import numpy as np

def encode(
    tiles: np.ndarray,
    values: np.ndarray,
    states: np.ndarray,
    twice_k: int,
    reach: int,
    slack: float,
    scale: float,
    threads: int,
    isa: str = "",
) -> None: ...
def instruction_sets() -> list[str]: ...
