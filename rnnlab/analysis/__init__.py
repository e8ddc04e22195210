"""What a recurrence does to its state and its gradients, one question a file.

Functions of a `layers.Recurrence`: the cell, its parameters, and real inputs.
"""
