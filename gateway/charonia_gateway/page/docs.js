// The page at /docs: swagger-ui of /openapi.json.

// A key that the chat page was given for this browser session opens the documentation too.
const key = sessionStorage.getItem("charonia-key") ?? localStorage.getItem("charonia-key");

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  requestInterceptor: (request) => {
    if (key && !request.headers.Authorization) request.headers.Authorization = `Bearer ${key}`;
    return request;
  },
});
