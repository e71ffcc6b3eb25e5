"""Hides the optimizer update behind training: `model, optimizer = hytrain_fx.compile(model, optimizer)`."""
