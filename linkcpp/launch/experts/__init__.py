"""Mode ``experts``: a hollow backbone, expert workers on the nodes, the virtual device, the front.

``attempt`` brings it up and watches what must not end. ``members`` keeps each worker of the plan
there, as long and as often as its node lets it, while everything else goes on.
"""
