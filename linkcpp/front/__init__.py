"""The front: what listens for the API of a deployment, before a llama-server on loopback.

``process`` is the program, ``proxied_request`` one request on its way, ``gate`` lets requests
through while llama-server has nothing to forget, ``openai_errors`` are the errors that clients see.
"""
