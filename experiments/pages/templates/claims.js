// Claims: an image is taken from the list of figures when its claim is first opened.
const claims = [...document.querySelectorAll("#claims-table details")];
for (const claim of claims) {
  claim.addEventListener("toggle", () => {
    const empty = claim.querySelector("[data-image]:empty");
    const source = empty && byId(empty.dataset.image)?.querySelector("img");
    if (source) empty.append(source.cloneNode());
  });
}
const openAll = byId("open-all");
openAll?.addEventListener("click", () => {
  const open = claims.some((claim) => !claim.open);
  for (const claim of claims) claim.open = open;
  openAll.setAttribute("aria-pressed", String(open));
  openAll.textContent = open ? "Close all" : "Open all";
});
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
// A link to what lies in closed details opens them.
function openTarget() {
  const target = byId(decodeURIComponent(location.hash.slice(1)));
  if (target?.tagName === "DETAILS") target.open = true;
}
addEventListener("hashchange", openTarget);
openTarget();
