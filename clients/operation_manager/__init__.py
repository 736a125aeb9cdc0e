"""A client of the operation manager's service: `ProxyOperationManager` over a `Link`."""

from clients.operation_manager.links import DialledLink, Link
from clients.operation_manager.proxy_operation_manager import ProxyOperationManager

__all__ = ["DialledLink", "Link", "ProxyOperationManager"]
