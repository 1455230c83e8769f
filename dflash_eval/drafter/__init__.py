"""DFlash drafters: the model, and the checkpoint formats it is read from."""
