"""What `.grad` is between backward and step.

Is given gradients as the backward makes them. Returns where they are: in a slot on the host, on
the device, or with the user. Never updates a weight.
"""
