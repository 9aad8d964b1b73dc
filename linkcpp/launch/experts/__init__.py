"""Mode ``experts``: a hollow backbone, expert workers on the nodes, the virtual device, the front.

``attempt`` brings it up and watches what must not end. ``members`` keeps each share of the plan
computed, by a worker on a node (``remote_member``) or an rpc-server here (``own_member``), as long
and as often as that machine lets it, while everything else goes on.
"""
