"""Methods that send factors of low rank: PowerSGD."""
