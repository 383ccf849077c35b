"""What a proof needs to know of a checkpoint besides its forward."""
