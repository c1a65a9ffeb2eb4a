"""Fake clouds with real hosts: everything that SkyPilot, boto3 and Google's clients need, in one network namespace.

`World` (world.py) is what tests use. AWS is moto with the parts that EC2 has and moto lacks; Compute Engine, IAM and
Cloud Storage are our own slices; a host is a set of namespaces with sshd and a metadata face. Clients are unmodified
and are told nothing but endpoints, credentials and addresses.
"""
