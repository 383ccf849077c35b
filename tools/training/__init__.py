"""The training of the small model that ``proofserve model new --arch trained`` writes."""
