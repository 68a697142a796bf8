"""The proxy's server: agents on one side, replicas and the store on the other."""

from gyre_sdk.harness.proxy.server.app import ProxyServer
from gyre_sdk.harness.proxy.server.main import main
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy, ProxySettings, SamplingPolicy, new_key

__all__ = ["HistoryPolicy", "ProxyServer", "ProxySettings", "SamplingPolicy", "main", "new_key"]
