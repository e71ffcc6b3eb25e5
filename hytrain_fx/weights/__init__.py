"""What the loop may read and write.

Is given the model's parameters. Returns them guarded: a read waits for the update in flight, a
write from outside is seen. Never updates a weight itself.
"""
