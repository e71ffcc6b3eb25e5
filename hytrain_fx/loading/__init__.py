"""Values for models on the meta device: where they come from, and how parameters get them.

Made at `compile`, one tensor after the other, so that nothing is ever whole.
"""
