"""Why a drafter's τ is low: it is run in other ways than its config says, and its numbers and weights are read."""
