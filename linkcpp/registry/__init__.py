"""What hub, gateway, node and coordinator tell each other.

Records of the hub's API, signed tokens and tickets, this machine's keys and credentials on disk,
the first message of a relay, and the client of a hub.
"""
