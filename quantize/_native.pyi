import numpy as np

def encode(
    tiles: np.ndarray,
    values: np.ndarray,
    states: np.ndarray,
    twice_k: int,
    lead: int,
    fixed_point: bool,
    threads: int,
    isa: str = "",
) -> None: ...
def instruction_sets() -> list[str]: ...
